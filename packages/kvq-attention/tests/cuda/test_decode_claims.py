"""What SUPPORT claims of the CUDA decode kernel, each row against float64 attention on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvq_attention import AttentionError, crossovers, launches, ops
from kvq_attention.claims import CUDA_CODECS, CUDA_HEAD_DIMS, CUDA_MOST_GROUP, CUDA_PAGE_TOKENS
from kvq_codecs import get

from ..decode.cases import judge
from ..decode.places import CUDA
from ..scene import TIER, Geometry, build

pytestmark = pytest.mark.gpu

BACKEND = "cuda"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Each of the sixteen rows of a tile is filled by some, and some leave padding.
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
# One codec of each layout of scales beside one of another.
PAIRS = [("q8_0", "q4_0"), ("bf16", "nvfp4"), ("iso3", "fp16"), ("fp8", "iso4"), ("q6_0", "bf16")]


def check(geometry: Geometry, seed: int = 0, **scoring: Any) -> None:
    """Attend in a scene of this geometry, see that the kernel ran, and judge the output."""
    scene = build(geometry, "cuda", stored_queries=True, seed=seed)
    with launches.counting() as counted:
        out = CUDA.attend(scene, **scoring)
    assert counted[BACKEND]["decode"] > 0
    judge(out, scene.expected(fresh=False, **scoring), geometry.dtype)


def dims_of(codec: str) -> list[int]:
    return [dim for dim in CUDA_HEAD_DIMS if dim % get(codec).spec.divisor == 0]


def dtypes_of(*codecs: str) -> tuple[torch.dtype, ...]:
    """Rows of bf16 are multiplied with queries of bf16."""
    return (torch.bfloat16,) if "bf16" in codecs else DTYPES


@pytest.mark.proves("cuda.decode.plain")
@pytest.mark.parametrize("page_tokens", CUDA_PAGE_TOKENS)
@pytest.mark.parametrize(("codec", "dim"), [(c, dim) for c in CUDA_CODECS for dim in dims_of(c)])
def test_cuda_decodes_every_codec(codec: str, dim: int, page_tokens: int) -> None:
    n = page_tokens
    for dtype in dtypes_of(codec):
        sizes: dict[str, Any] = {
            "heads": 2,
            "kv_heads": 2,
            "dim": dim,
            "page_tokens": n,
            "dtype": dtype,
        }
        check(Geometry(codec, **sizes, lengths=(1, n - 1, n, n + 1, 700)), seed=dim)


@pytest.mark.proves("cuda.decode.mixed_codecs")
@pytest.mark.parametrize(("k", "v"), [*PAIRS, *[(v, k) for k, v in PAIRS]])
def test_cuda_decodes_two_codecs(k: str, v: str) -> None:
    for dtype in dtypes_of(k, v):
        sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, "dim": 128, "dtype": dtype}
        check(Geometry(k, v, **sizes, lengths=(40, 333), queries=2))


@pytest.mark.proves("cuda.decode.gqa")
@pytest.mark.parametrize("group", GROUPS)
def test_cuda_decodes_shared_kv_heads(group: int) -> None:
    most = CUDA_MOST_GROUP // group
    check(Geometry("q8_0", heads=2 * group, kv_heads=2, lengths=(53,)))
    lengths, queries = (53, 9, 200), (most, 1, max(1, most - 1))
    check(Geometry("nvfp4", heads=group, kv_heads=1, dim=128, lengths=lengths, queries=queries))


@pytest.mark.proves("cuda.decode.window")
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40, 1000, 2**31, 2**63 - 1])
def test_cuda_decodes_a_window(window: int) -> None:
    shape = Geometry("q8_0", heads=1, kv_heads=1, lengths=(1, 90, 33), queries=(1, 1, 5))
    check(shape, window=window)


@pytest.mark.proves("cuda.decode.softcap")
@pytest.mark.parametrize("softcap", [0.5, 30.0, 1e8])
def test_cuda_decodes_capped_scores(softcap: float) -> None:
    shape = Geometry("q8_0", heads=4, lengths=(1, 53), queries=(1, 2))
    check(shape, softcap=softcap, scale=1.0)


@pytest.mark.proves("cuda.decode.sinks")
def test_cuda_decodes_sinks() -> None:
    shape = Geometry("q8_0", heads=6, lengths=(1, 53), queries=(1, 2))
    sinks = torch.tensor([-30.0, 0.0, 1.5, 4.0, 0.25, 8.0], device="cuda")
    check(shape, sinks=sinks)
    check(shape, sinks=sinks.bfloat16(), window=7)
    check(shape, sinks=sinks.half(), softcap=2.0)
    scene = build(shape, "cuda", stored_queries=True)
    everything = CUDA.attend(scene, sinks=torch.full((6,), 1e4, device="cuda"))
    assert torch.equal(everything, torch.zeros_like(everything))


def test_any_number_of_query_tokens() -> None:
    shape = Geometry("q8_0", heads=4, kv_heads=1, lengths=(40, 20, 3), queries=(19, 0, 3))
    check(shape, window=9)


def test_auto_goes_on_where_rows_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Geometry("q8_0", heads=4, kv_heads=2, lengths=(53,))
    scene = build(shape, "cuda", stored_queries=True)

    def apart(plane: torch.Tensor) -> torch.Tensor:
        return torch.stack([plane, plane], dim=3)[:, :, :, 0]

    k_cache, v_cache = (cache.map(apart) for cache in scene.caches)
    given = (scene.q, k_cache, v_cache, scene.batch(), TIER)
    with pytest.raises(AttentionError, match="rows of a page must lie next to each other for cuda"):
        ops.decode(*given, scale=scene.scale, backend=BACKEND)
    monkeypatch.setattr(crossovers, "fastest", lambda *_: True)
    with launches.counting() as counted:
        out = ops.decode(*given, scale=scene.scale)
    assert counted["triton"]["decode"] and not counted[BACKEND]["decode"]
    assert any(key[:2] == (BACKEND, "decode") for key in launches.passed_over())
    judge(out, scene.expected(fresh=False), torch.float32)
