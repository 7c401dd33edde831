"""The benchmark where it means something: on a GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch

from kvq_attention import ops
from kvq_attention.bench import plan, problems, profiled, run
from kvq_attention.bench.cases import Case, Formats, Shape
from kvq_attention.bench.ceilings import measure_ceilings
from kvq_attention.bench.data import TIER, batches, empty_pool, fill, random_rows
from kvq_attention.cuda import module

from ..triton.cases import compiled

pytestmark = [pytest.mark.gpu, compiled]

NO_CUDA = module.unavailable("cuda")
CASE, SHAPE = Case(8, 8192), Shape(32, 8, 128)
MAX_READ = 1.15  # times the packed bytes
PACKED = ("nvfp4", "q4_0", "iso3", "q8_0", "fp8")
COUNTED = ("nvfp4", "q4_0")  # each takes ncu some twenty seconds

BACKENDS = [
    "triton",
    pytest.param("cuda", marks=pytest.mark.skipif(NO_CUDA is not None, reason=str(NO_CUDA))),
]


def test_figures_of_a_small_run_are_possible() -> None:
    found = run(
        plan(backend="triton", codecs="q4_0", cases="8x4k", pages="16", store_tokens="2048", jobs=0)
    )
    assert problems(found) == []
    assert {row["backend"] for row in found["decode"]} == {"triton"}
    assert {row["how"] for row in found["decode"]} == {"graph"}
    for row in found["decode"]:
        assert 0 < row["share_of_read"] < 1, "faster than memory: something was not read"
        assert row["us_p10"] <= row["us"] <= row["us_p90"]
    assert len(found["peers"]) == 1


def test_reading_at_random_is_at_most_as_fast_as_the_memory() -> None:
    ceilings, ways = measure_ceilings("cuda", 10)
    assert ceilings.read is not None and ceilings.copy is not None
    assert 0.5 * ceilings.copy < ceilings.read < 2 * ceilings.copy
    assert len(ways) > 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", COUNTED)
def test_p045_decode_reads_little_more_than_the_packed_bytes(codec: str, backend: str) -> None:
    """Counted by the GPU's own counters, over the decode's and the merge's kernels."""
    ncu = shutil.which("ncu")
    if ncu is None:
        pytest.skip("needs ncu on PATH")
    command = [
        *(ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv"),
        *("--metrics", "dram__bytes_read.sum", "--print-units", "base", "--print-fp"),
        *(sys.executable, "-m", profiled.__name__, codec, "--attention-backend", backend),
        *("--case", CASE.name, "--shape", SHAPE.name),
    ]
    done = subprocess.run(command, capture_output=True, check=False, text=True, timeout=300)
    said = done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in said or "Failed to initialize the profiler" in said:
        pytest.skip("ncu may not read this machine's counters")
    read = sum(values_of("dram__bytes_read.sum", done.stdout))
    packed = CASE.tokens * Formats(codec, codec).token_bytes(SHAPE)
    assert 0.9 * packed < read < MAX_READ * packed, said[-3000:]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", PACKED)
def test_p045_decode_has_no_room_for_an_unpacked_cache(codec: str, backend: str) -> None:
    """What it allocates beside its output is far less than the cache, packed or not."""
    formats, random = Formats(codec, codec), torch.Generator("cuda").manual_seed(0)
    (batch,) = batches(CASE, 16, 1, random)
    pool = empty_pool(formats, SHAPE, batch.table(TIER).page_table.numel(), 16, "cuda")
    fill(pool, SHAPE, "triton", random)
    q = random_rows(CASE.batch, SHAPE, SHAPE.heads, random)

    def decode() -> torch.Tensor:
        return ops.decode(q, pool.k, pool.v, batch, TIER, scale=0.1, backend=backend)

    decode()  # tables that it makes once
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    decode()
    torch.cuda.synchronize()
    grown = torch.cuda.max_memory_allocated() - before
    assert grown < CASE.tokens * formats.token_bytes(SHAPE) / 5


def values_of(metric: str, csv_text: str) -> list[float]:
    """A metric's values in what ncu prints with --csv: the last field of its lines."""
    found = []
    for line in csv_text.splitlines():
        if f'"{metric}"' in line:
            fields = json.loads(f"[{line}]")  # every field is in double quotes
            found.append(float(fields[-1].replace(",", "")))
    return found
