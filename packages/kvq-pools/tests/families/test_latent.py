"""One latent row per token, and the index keys beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pool_cases import spec

import kvq_codecs
from kvq_codecs import RowError
from kvq_pools import PlanError, Pool, PoolPlan, dsa, mla

# A model of 45 layers of which eleven keep a cache; four of those reuse their leader's selection.
REMAPPED = (3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43)
LEADERS = (3, 11, 15, 23, 27, 35, 43)


def remapped(**change: Any) -> PoolPlan:
    options: dict[str, Any] = {
        "layers": REMAPPED,
        "index_layers": LEADERS,
        "latent_dim": 512,
        "rope_dim": 64,
        "latent": spec("fp8"),
        "index_dim": 128,
        "index": spec("bf16"),
        "page_tokens": 4,
        "model_layers": 45,
    }
    return dsa(**(options | change))


@pytest.mark.parametrize(
    ("codec", "at_512", "at_576"), [("bf16", 1024, 1152), ("fp8", 516, 580), ("nvfp4", 292, 328)]
)
def test_price_of_a_latent_row(codec: str, at_512: int, at_576: int) -> None:
    for rope, price in ((0, at_512), (64, at_576)):
        plan = mla(
            layers=range(61), latent_dim=512, rope_dim=rope, latent=spec(codec), page_tokens=64
        )
        assert plan.token_bytes == 61 * price
        (slab,) = plan.tier("full").slabs
        assert (slab.name, slab.heads, slab.dim) == ("latent", 1, 512 + rope)


def test_a_codec_whose_block_does_not_divide_the_whole_row_is_refused() -> None:
    with pytest.raises(RowError, match=r"iso4: head_dim 576 is not a multiple of 128"):
        mla(layers=(0,), latent_dim=512, rope_dim=64, latent=spec("iso4"), page_tokens=16)


def test_index_keys_cost_two_bytes_a_value_in_the_layers_that_have_them() -> None:
    assert remapped().token_bytes == 11 * 580 + 7 * 128 * 2
    assert remapped().granularity == 1


def test_the_remap_holds_for_rows_scales_and_index_alike() -> None:
    """Each layer's rows lie where its id says, in every plane; layers outside have none."""
    codec = kvq_codecs.get("fp8")
    pool = Pool(remapped(), 2)
    rng = np.random.default_rng(0)
    rows = {n: rng.standard_normal((3, 1, 4, 576)).astype(np.float32) * (n + 1) for n in REMAPPED}
    for layer, values in rows.items():
        for name, plane in codec.encode(values).planes.items():
            pool.view("latent", layer).planes[name][...] = plane
        if layer in LEADERS:
            pool.view("index_k", layer).planes["values"][...] = layer
    for layer, values in rows.items():
        view = pool.view("latent", layer)
        assert view.planes.keys() == {"codes", "row_scale"}
        assert np.array_equal(codec.decode(view), codec.decode(codec.encode(values)))
    assert all(np.all(pool.view("index_k", n).planes["values"] == n) for n in LEADERS)
    for layer in set(range(45)) - set(REMAPPED):
        with pytest.raises(KeyError, match=rf"layer {layer}\b"):
            pool.view("latent", layer)


def test_layers_that_share_a_selection_own_no_index_rows() -> None:
    pool = Pool(remapped(), 2)
    assert pool.view("index_k", 43).shape == (3, 1, 4, 128)
    for layer in set(REMAPPED) - set(LEADERS):
        with pytest.raises(KeyError, match=rf"no slab 'index_k' stores layer {layer}\b"):
            pool.view("index_k", layer)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"index_layers": ()}, "a model without any is an mla"),
        ({"index_layers": (3, 4)}, r"index_layers \[4\] are not among"),
        ({"layers": (3, 45)}, r"\[45\] are beyond a model of 45"),
        ({"index": spec("q8_0")}, "bf16 or fp16, got q8_0; index keys are never quantized"),
        ({"index": spec("fp32")}, "got fp32"),
        ({"index": "bf16"}, "got 'bf16'"),
        ({"latent_dim": 0}, "latent_dim"),
        ({"rope_dim": -1}, "rope_dim"),
        ({"latent": {3: spec("fp8")}}, "'latent'"),
    ],
)
def test_plans_that_cannot_be(change: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        remapped(**change)
