"""What SUPPORT claims of the Triton decode kernel, each row against float64 attention."""

from __future__ import annotations

import pytest
import torch

import kvq_codecs
from kvq_attention import launches

from ..decode.cases import check_output, ieee, name_of
from ..decode.places import INTERPRETED, TRITONS, Place, each_codec, each_place
from .cases import BACKEND

pytestmark = ieee

# Where a test is about indices, it runs in the interpreter alone: a GPU would compile each of its
# shapes for seconds.
in_interpreter = each_place([INTERPRETED])
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 20)
# A codec and one with a different number of bits, twice; K's and V's head_dim.
MIXED = [
    *[(k, v, 128, 128) for k, v in zip(kvq_codecs.names(), kvq_codecs.names()[4:], strict=False)],
    *[("nvfp4", "bf16", 64, 128), ("iso3", "q8_0", 256, 96), ("fp8_e4m3", "fp32", 192, 80)],
    *[("iso4", "nvfp4", 128, 112), ("q4_0", "fp16", 96, 64), ("fp32", "iso3", 80, 128)],
]


@pytest.mark.proves("triton.decode.plain")
@each_codec(places=TRITONS)
def test_triton_decodes_every_codec(codec: str, place: Place) -> None:
    scene = place.scene(codec, heads=4, dim=128, lengths=(1, 150, 17))
    with launches.counting() as counted:
        out = place.attend(scene)
    assert counted[BACKEND]["decode"] > 0, "the kernel ran, not the reference"
    check_output(scene, out)


@pytest.mark.proves("triton.decode.mixed_codecs")
@pytest.mark.parametrize("case", MIXED, ids=name_of)
@in_interpreter
def test_triton_decodes_two_codecs(case: tuple[str, str, int, int], place: Place) -> None:
    k, v, dim, v_dim = case
    place.check(k, v, heads=2, dim=dim, v_dim=v_dim, lengths=(40,), queries=2)


@pytest.mark.proves("triton.decode.value_dim")
@pytest.mark.parametrize("dims", [(64, 256), (256, 64), (96, 80), (192, 128)])
@in_interpreter
def test_triton_decodes_two_head_dims(dims: tuple[int, int], place: Place) -> None:
    place.check("fp8", dim=dims[0], v_dim=dims[1], lengths=(1, 50), queries=2)


@pytest.mark.proves("triton.decode.gqa")
@pytest.mark.parametrize("group", GROUPS)
@in_interpreter
def test_triton_decodes_shared_kv_heads(group: int, place: Place) -> None:
    place.check("q8_0", heads=2 * group, kv_heads=2, lengths=(53,))
    place.check("fp8", heads=group, kv_heads=1, lengths=(53, 9), queries=(2, 1))


@pytest.mark.proves("triton.decode.window")
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40, 1000, 2**31, 2**63 - 1])
@each_place(TRITONS)
def test_triton_decodes_a_window(window: int, place: Place) -> None:
    shape = {"heads": 1, "kv_heads": 1, "lengths": (1, 90, 33), "queries": (1, 1, 5)}
    place.check("q8_0", **shape, window=window)


@pytest.mark.proves("triton.decode.softcap")
@pytest.mark.parametrize("softcap", [0.5, 30.0, 1e8])
@each_place(TRITONS)
def test_triton_decodes_capped_scores(softcap: float, place: Place) -> None:
    place.check("q8_0", heads=4, lengths=(1, 53), queries=(1, 2), softcap=softcap, scale=1.0)


@pytest.mark.proves("triton.decode.sinks")
@each_place(TRITONS)
def test_triton_decodes_sinks(place: Place) -> None:
    sinks = torch.tensor([-30.0, 0.0, 1.5, 4.0, 0.25, 8.0], device=place.device)
    scene = place.scene("q8_0", heads=6, lengths=(1, 53), queries=(1, 2))
    for scoring in (
        {"sinks": sinks},
        {"sinks": sinks.bfloat16(), "window": 7},
        {"sinks": sinks.half(), "softcap": 2.0},
    ):
        check_output(scene, place.attend(scene, **scoring), **scoring)
    everything = place.attend(scene, sinks=torch.full((6,), 1e4, device=place.device))
    assert torch.equal(everything, torch.zeros_like(everything))
    nothing = place.attend(scene, sinks=torch.full((6,), -torch.inf, device=place.device))
    check_output(scene, nothing)
