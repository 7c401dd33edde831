"""Decode at the edges of what a call may hold: no requests, sinks and values of any size."""

from __future__ import annotations

import pytest
import torch

from kvq_attention import Batch, Table

from ..scene import TIER, Scene
from .cases import check_output, ieee, judge, poison_new_tensors, refill, with_table
from .places import CUDAS, Place, each_codec, each_place

pytestmark = ieee


def scene_of(codec: str, place: Place) -> Scene:
    return place.scene(codec, heads=2, kv_heads=1, dim=128, lengths=(40,), seed=3)


def widened(batch: Batch) -> Batch:
    """With a page table for more than a chunk: partial results are merged."""
    table = batch.tables[TIER].page_table
    return with_table(batch, torch.nn.functional.pad(table, (0, 96), value=-1))


@pytest.mark.parametrize("columns", [1, 96], ids=["one chunk", "merged"])
@each_place()
def test_rows_of_no_request_at_all_give_0(
    columns: int, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = scene_of("fp16", place)
    nobody = Batch(
        torch.zeros(1, dtype=torch.int32, device=place.device),
        torch.zeros(0, dtype=torch.int32, device=place.device),
        {
            TIER: Table(
                torch.zeros(0, columns, dtype=torch.int32, device=place.device),
                torch.full((3,), -1, device=place.device),
            )
        },
        scene.batch().page_tokens,
    )
    with monkeypatch.context() as patched:
        assert poison_new_tensors(patched) == []
        out = place.attend(scene, batch=nobody, q=torch.randn(3, 2, 128, device=place.device))
    assert not out.any()


@pytest.mark.parametrize("merged", [False, True], ids=["one chunk", "merged"])
@pytest.mark.parametrize(
    "sink", [torch.inf, 3e38, 1e300, -torch.inf, -3e38], ids=lambda sink: f"{sink:g}"
)
@each_place()
def test_sinks_of_any_size(sink: float, merged: bool, place: Place) -> None:
    """The largest leave nothing for the values, the smallest nothing for themselves."""
    scene = scene_of("q8_0", place)
    sinks = torch.tensor([sink, 0.5], dtype=torch.float64, device=place.device)
    batch = widened(scene.batch()) if merged else scene.batch()
    out = place.attend(scene, batch=batch, sinks=sinks)
    if sink > 0:
        assert not out[:, 0].any()
        sinks[0] = 0.0  # the other head is as it would be
        expected = scene.expected(fresh=False, sinks=sinks)
        judge(out[:, 1:], expected[:, 1:], torch.float32)
    else:
        check_output(scene, out, sinks=sinks)


@pytest.mark.parametrize("length", [40, 0])
@each_place(CUDAS)
def test_sinks_give_the_same_bits_with_a_merge_and_without(length: int, place: Place) -> None:
    scene = scene_of("q8_0", place)
    batch = scene.batch()
    batch.seq_lens.fill_(length)
    for pair in ([0.3, -0.7], [2.0, 9.0], [-torch.inf, -torch.inf]):
        sinks = torch.tensor(pair, device=place.device)
        alone = place.attend(scene, batch=batch, sinks=sinks)
        assert torch.equal(alone, place.attend(scene, batch=widened(batch), sinks=sinks))
        assert alone.isfinite().all()
        assert alone.any() == (length > 0)


@pytest.mark.parametrize("gain", [1e28, 1e34], ids=lambda gain: f"{gain:g}")
@each_codec(["fp8", "nvfp4", "fp32", "bf16"])
def test_values_as_large_as_float32_holds(codec: str, gain: float, place: Place) -> None:
    """Formats with a float32 scale store them, so sums of them must not overflow."""
    scene = scene_of(codec, place)
    for v in scene.vs:
        v.mul_(gain)
    refill(scene)
    check_output(scene, place.attend(scene))
