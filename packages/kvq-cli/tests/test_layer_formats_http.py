"""The status says of every layer how it is stored, and what it says is what the pool holds."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from http_server import serving
from tiny_models import gemma, llama, make_async_engine, make_engine


@pytest.mark.parametrize(
    ("make", "cache"),
    [
        (llama, "q8_0"),
        (gemma, "k=q8_0,v=q4_0"),
        (gemma, "0-1:bf16,2-:k=q8_0,v=q4_0"),
        (gemma, "0:fp32,1-2:q4_0,3:bf16"),
    ],
)
def test_p072_every_layer_has_its_format_in_the_status_sliding_or_not(
    make: Any, cache: str
) -> None:
    """A kind of quiet gap: some layers, of a sliding window say, keep another format untold."""
    model = make()
    engine = make_engine(model, cache=cache, attention_backend="reference")
    with serving(make_async_engine(engine)) as url:
        told = httpx.get(f"{url}/v1/kv/status").json()["tiers"]
    plan, layers = engine.cache.pool.plan, range(model.config.num_hidden_layers)
    for name in ("k", "v"):
        found = {
            layer: (tier["name"], each["codec"])
            for tier in told
            for each in tier["stored"]
            if each["name"] == name
            for layer in each["layers"]
        }
        stored = {
            layer: (tier.name, slab.spec.name)
            for tier in plan.tiers
            for slab in tier.slabs
            if slab.name == name
            for layer in slab.layers
        }
        assert found == stored
        assert sorted(found) == list(layers)
    for tier in told:
        assert sum(each["bytes"] for each in tier["stored"]) == tier["bytes"]
    count = sum(len(each["layers"]) for tier in told for each in tier["stored"])
    assert count == 2 * len(layers), "no layer is told twice"
