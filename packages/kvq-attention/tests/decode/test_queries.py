"""What a step may ask: any number of query tokens, tensors of any strides, of a graph, negated."""

from __future__ import annotations

import pytest
import torch

from kvq_attention import Batch, Table

from ..scene import TIER
from .cases import check_output, ieee
from .places import Place, each_place

pytestmark = ieee


@pytest.mark.parametrize("queries", range(1, 9))
@each_place()
def test_decode_takes_one_to_eight_query_tokens(queries: int, place: Place) -> None:
    place.check("q4_0", heads=2, kv_heads=1, lengths=(8, 45), queries=queries)


@each_place()
def test_decode_takes_any_number_of_query_tokens(place: Place) -> None:
    shape = {"heads": 2, "kv_heads": 1, "lengths": (40, 20, 3), "queries": (19, 0, 3)}
    place.check("q8_0", **shape, window=9)


@each_place()
def test_a_step_without_tokens_gives_none(place: Place) -> None:
    scene = place.scene("q8_0", lengths=(20, 9), queries=(0, 0))
    assert place.attend(scene).shape == (0, 2, 64)


@pytest.mark.parametrize("layout", ["a slice of qkv", "heads first", "every second value"])
@each_place()
def test_queries_may_have_any_strides(layout: str, place: Place) -> None:
    scene = place.scene("q8_0", heads=4, dim=128, lengths=(20,), queries=2)
    q = scene.q
    if layout == "a slice of qkv":
        view = torch.cat([torch.full_like(q, torch.nan), q, torch.full_like(q, torch.nan)], 1)[
            :, 4:8
        ]
    elif layout == "heads first":
        view = q.transpose(0, 1).contiguous().transpose(0, 1)
    else:
        view = torch.stack([q, torch.full_like(q, torch.nan)], -1)[..., 0]
    assert torch.equal(view, q) and not view.is_contiguous()
    assert torch.equal(place.attend(scene, q=view), place.attend(scene))


@each_place()
def test_queries_and_sinks_of_a_graph_or_with_a_pending_sign(place: Place) -> None:
    scene = place.scene("q8_0", heads=4, lengths=(20,))
    q, sinks = scene.q, torch.linspace(-1, 2, 4, device=place.device)
    plain = place.attend(scene, sinks=sinks)
    out = place.attend(scene, q=q.clone().requires_grad_(), sinks=torch.nn.Parameter(sinks))
    assert torch.equal(out, plain)
    assert not out.requires_grad
    out = place.attend(scene, q=torch._neg_view(-q), sinks=torch._neg_view(-sinks))
    assert torch.equal(out, plain)
    with torch.autocast(place.device, dtype=torch.bfloat16):
        assert torch.equal(place.attend(scene, sinks=sinks), plain)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@each_place()
def test_sinks_of_any_dtype_and_stride(dtype: torch.dtype, place: Place) -> None:
    scene = place.scene("q8_0", heads=4, lengths=(20,))
    sinks = torch.linspace(-1, 2, 4, device=place.device).to(dtype)
    spread = torch.stack([sinks, torch.full_like(sinks, 1e4)], dim=1)[:, 0]
    check_output(scene, place.attend(scene, sinks=spread), sinks=sinks)


@each_place()
def test_tables_may_have_any_strides(place: Place) -> None:
    scene = place.scene("q8_0", lengths=(40, 5, 20), queries=(1, 2, 1))
    batch = scene.batch()

    def spread(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, torch.full_like(x, 10**6)], dim=-1)[..., 0]

    table = batch.tables[TIER]
    strided = Batch(
        spread(batch.query_offsets),
        spread(batch.seq_lens),
        {TIER: Table(spread(table.page_table), spread(table.slot_mapping))},
        batch.page_tokens,
    )
    assert strided.seq_lens.stride() == (2,)
    assert torch.equal(place.attend(scene, batch=strided), place.attend(scene))
