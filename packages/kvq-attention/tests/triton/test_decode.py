"""The Triton decode kernel against float64 attention over the decoded cache: every feature."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvq_codecs
from kvq_attention import Batch, Table, launches

from ..scene import TIER, Geometry, build
from .cases import (
    BACKEND,
    DIMS,
    DTYPES,
    PACKED,
    PAGE_TOKENS,
    attend,
    check,
    dims_of,
    each_codec,
    each_device,
    ieee,
    in_interpreter,
    judge,
    pairwise,
)

pytestmark = ieee

QUERIES = (1, 2, 3, 4, 5, 6, 7, 8, (2, 0, 1))
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 20)
SCORINGS = ("plain", "window", "softcap", "sinks", "all")
# Query tokens × heads of a group in a case: each row costs the interpreter milliseconds.
MOST_ROWS = 24


def fits(case: dict[str, Any]) -> bool:
    """Whether the values of a case, or of a part of one, go together."""
    if "codec" in case and "dim" in case and case["dim"] not in dims_of(case["codec"]):
        return False
    if "group" not in case or "queries" not in case:
        return True
    queries = case["queries"]
    return case["group"] * (queries if isinstance(queries, int) else sum(queries)) <= MOST_ROWS


SWEEP = list(
    pairwise(
        {
            "codec": kvq_codecs.names(),
            "dim": DIMS,
            "page_tokens": PAGE_TOKENS,
            "group": GROUPS,
            "queries": QUERIES,
            "scoring": SCORINGS,
            "dtype": DTYPES,
        },
        fits,
    )
)
# A codec and one with a different number of bits, twice; K's and V's head_dim.
MIXED = [
    *[(k, v, 128, 128) for k, v in zip(kvq_codecs.names(), kvq_codecs.names()[4:], strict=False)],
    *[("nvfp4", "bf16", 64, 128), ("iso3", "q8_0", 256, 96), ("fp8_e4m3", "fp32", 192, 80)],
    *[("iso4", "nvfp4", 128, 112), ("q4_0", "fp16", 96, 64), ("fp32", "iso3", 80, 128)],
]


def name_of(case: Any) -> str:
    """A test id."""
    parts = case.values() if isinstance(case, dict) else case
    return "-".join(str(part).removeprefix("torch.").replace(" ", "") for part in parts)


def scoring_of(name: str, heads: int, dim: int, device: str = "cpu") -> dict[str, Any]:
    """The arguments of a scoring: a window that cuts pages, a cap that bends scores, sinks."""
    parts: dict[str, dict[str, Any]] = {
        "plain": {},
        "window": {"window": 21},
        "softcap": {"softcap": 1.5, "scale": 2 * dim**-0.5},
        "sinks": {"sinks": torch.linspace(-2, 3, heads, device=device)},
    }
    if name == "all":
        return {key: value for part in parts.values() for key, value in part.items()}
    return parts[name]


@pytest.mark.parametrize("case", SWEEP, ids=name_of)
@in_interpreter
def test_decode_sweeps_pairs_of_everything(case: dict[str, Any], device: str) -> None:
    n, group, queries = case["page_tokens"], case["group"], case["queries"]
    kv_heads = 2 if group == 1 else 1
    long = n + n // 2 + 1
    geometry = Geometry(
        case["codec"],
        heads=group * kv_heads,
        kv_heads=kv_heads,
        dim=case["dim"],
        page_tokens=n,
        lengths=(long,) if isinstance(queries, int) else (long, 5, n),
        queries=queries,
        dtype=case["dtype"],
    )
    scoring = scoring_of(case["scoring"], geometry.heads, geometry.dim, device)
    check(geometry, device, seed=SWEEP.index(case), **scoring)


def test_the_sweep_has_every_pair() -> None:
    pairs = {(case["codec"], case["dim"]) for case in SWEEP}
    assert pairs == {(codec, dim) for codec in kvq_codecs.names() for dim in dims_of(codec)}
    for axis, values in (("group", GROUPS), ("queries", QUERIES), ("dtype", DTYPES)):
        pairs = {(case["codec"], case[axis]) for case in SWEEP}
        assert len(pairs) == len(kvq_codecs.names()) * len(values)
        pairs = {(case["scoring"], case[axis]) for case in SWEEP}
        assert len(pairs) == len(SCORINGS) * len(values)


@pytest.mark.proves("triton.decode.plain")
@each_codec
@each_device
def test_triton_decodes_every_codec(codec: str, device: str) -> None:
    shape = Geometry(codec, heads=4, dim=128, lengths=(1, 150, 17))
    scene = build(shape, device, stored_queries=True)
    with launches.counting() as counted:
        out = attend(scene)
    assert counted[BACKEND]["decode"] > 0, "the kernel ran, not the reference"
    judge(out, scene.expected(fresh=False), torch.float32)


@pytest.mark.parametrize(
    ("codec", "dim"), [(codec, dim) for codec in PACKED for dim in dims_of(codec)]
)
@in_interpreter
def test_p054_every_head_dim_of_every_packed_codec(codec: str, dim: int, device: str) -> None:
    shape = Geometry(codec, heads=2, kv_heads=1, dim=dim, lengths=(37,), dtype=torch.bfloat16)
    check(shape, device)


@each_codec
@pytest.mark.parametrize("page_tokens", PAGE_TOKENS)
@in_interpreter
def test_p057_every_page_size_at_its_edges(codec: str, page_tokens: int, device: str) -> None:
    lengths = (page_tokens - 1, page_tokens, page_tokens + 1)
    shape = Geometry(codec, heads=1, kv_heads=1, dim=128, page_tokens=page_tokens, lengths=lengths)
    check(shape, device)


@pytest.mark.proves("triton.decode.mixed_codecs")
@pytest.mark.parametrize("case", MIXED, ids=name_of)
@in_interpreter
def test_triton_decodes_two_codecs(case: tuple[str, str, int, int], device: str) -> None:
    k, v, dim, v_dim = case
    check(Geometry(k, v, heads=2, dim=dim, v_dim=v_dim, lengths=(40,), queries=2), device)


@pytest.mark.proves("triton.decode.value_dim")
@pytest.mark.parametrize("dims", [(64, 256), (256, 64), (96, 80), (192, 128)])
@in_interpreter
def test_triton_decodes_two_head_dims(dims: tuple[int, int], device: str) -> None:
    check(Geometry("fp8", dim=dims[0], v_dim=dims[1], lengths=(1, 50), queries=2), device)


@pytest.mark.proves("triton.decode.gqa")
@pytest.mark.parametrize("group", GROUPS)
@in_interpreter
def test_triton_decodes_shared_kv_heads(group: int, device: str) -> None:
    check(Geometry("q8_0", heads=2 * group, kv_heads=2, lengths=(53,)), device)
    check(Geometry("fp8", heads=group, kv_heads=1, lengths=(53, 9), queries=(2, 1)), device)


@pytest.mark.proves("triton.decode.window")
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40, 1000, 2**31, 2**63 - 1])
@each_device
def test_triton_decodes_a_window(window: int, device: str) -> None:
    shape = Geometry("q8_0", heads=1, kv_heads=1, lengths=(1, 90, 33), queries=(1, 1, 5))
    check(shape, device, window=window)


@pytest.mark.proves("triton.decode.softcap")
@pytest.mark.parametrize("softcap", [0.5, 30.0, 1e8])
@each_device
def test_triton_decodes_capped_scores(softcap: float, device: str) -> None:
    shape = Geometry("q8_0", heads=4, lengths=(1, 53), queries=(1, 2))
    check(shape, device, softcap=softcap, scale=1.0)


@pytest.mark.proves("triton.decode.sinks")
@each_device
def test_triton_decodes_sinks(device: str) -> None:
    shape = Geometry("q8_0", heads=6, lengths=(1, 53), queries=(1, 2))
    sinks = torch.tensor([-30.0, 0.0, 1.5, 4.0, 0.25, 8.0], device=device)
    check(shape, device, sinks=sinks)
    check(shape, device, sinks=sinks.bfloat16(), window=7)
    check(shape, device, sinks=sinks.half(), softcap=2.0)
    scene = build(shape, device, stored_queries=True)
    everything = attend(scene, sinks=torch.full((6,), 1e4, device=device))
    assert torch.equal(everything, torch.zeros_like(everything))
    nothing = attend(scene, sinks=torch.full((6,), -torch.inf, device=device))
    judge(nothing, scene.expected(fresh=False), torch.float32)


@pytest.mark.parametrize("queries", range(1, 9))
@each_device
def test_decode_takes_one_to_eight_query_tokens(queries: int, device: str) -> None:
    check(Geometry("q4_0", heads=2, kv_heads=1, lengths=(8, 45), queries=queries), device)


@each_device
def test_decode_takes_any_number_of_query_tokens(device: str) -> None:
    shape = Geometry("q8_0", heads=2, kv_heads=1, lengths=(40, 20, 3), queries=(19, 0, 3))
    check(shape, device, window=9)


@each_device
def test_a_step_without_tokens_gives_none(device: str) -> None:
    scene = build(Geometry("q8_0", lengths=(20, 9), queries=(0, 0)), device, stored_queries=True)
    assert attend(scene).shape == (0, 2, 64)


@pytest.mark.parametrize("layout", ["a slice of qkv", "heads first", "every second value"])
@each_device
def test_queries_may_have_any_strides(layout: str, device: str) -> None:
    shape = Geometry("q8_0", heads=4, dim=128, lengths=(20,), queries=2)
    scene = build(shape, device, stored_queries=True)
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
    assert torch.equal(attend(scene, q=view), attend(scene))


@each_device
def test_queries_and_sinks_of_a_graph_or_with_a_pending_sign(device: str) -> None:
    scene = build(Geometry("q8_0", heads=4, lengths=(20,)), device, stored_queries=True)
    q, sinks = scene.q, torch.linspace(-1, 2, 4, device=device)
    plain = attend(scene, sinks=sinks)
    out = attend(scene, q=q.clone().requires_grad_(), sinks=torch.nn.Parameter(sinks))
    assert torch.equal(out, plain)
    assert not out.requires_grad
    out = attend(scene, q=torch._neg_view(-q), sinks=torch._neg_view(-sinks))
    assert torch.equal(out, plain)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(attend(scene, sinks=sinks), plain)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@each_device
def test_sinks_of_any_dtype_and_stride(dtype: torch.dtype, device: str) -> None:
    scene = build(Geometry("q8_0", heads=4, lengths=(20,)), device, stored_queries=True)
    sinks = torch.linspace(-1, 2, 4, device=device).to(dtype)
    spread = torch.stack([sinks, torch.full_like(sinks, 1e4)], dim=1)[:, 0]
    out = attend(scene, sinks=spread)
    judge(out, scene.expected(fresh=False, sinks=sinks), torch.float32)


@each_device
def test_tables_may_have_any_strides(device: str) -> None:
    shape = Geometry("q8_0", heads=2, lengths=(40, 5, 20), queries=(1, 2, 1))
    scene = build(shape, device, stored_queries=True)
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
    assert torch.equal(attend(scene, batch=strided), attend(scene))
