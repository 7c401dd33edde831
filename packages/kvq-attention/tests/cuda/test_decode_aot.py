"""The decode kernels compile for every architecture, and what they take of one is known."""

from __future__ import annotations

import pytest

import kvq_codecs
from kvq_attention.cuda import decode, formats

from ..decode.places import EMULATED, KINDS
from .compiling import REGISTERS, SHARED_KIB, Compiled, Job, run

ARCHS = (80, 86, 89, 90, 100, 120)
# All codecs without and with hardware for e4m3; the architectures between have a few codecs each.
PLAIN, REST = (80, 90), (86, 89, 100, 120)
ROWS = (4, 8, 16)

# Bytes that a thread's instructions reload of spilled registers, which lie outside the loop or once
# in it. Which codecs, at head_dim 128; a pair may reload both's:
SPILLED = {"q4_0": 12, "q8_0": 12, "nvfp4": 12, "iso3": 12, "iso4": 8}
# and at 256, where the sums of 16 rows alone take 128 registers: of each up to
WIDE_SPILLED = 28
# and of merges from compute capability 10.0 on
MERGE_SPILLED = 24
# Threads of a multiprocessor that merges are to have registers for
MERGING = 1024


def jobs() -> list[Job]:
    """Every codec in every number of rows where tuning looks, kinds of codecs elsewhere."""
    stored = [(name, dim) for name in formats.TYPES for dim in EMULATED.dims_of(name)]
    made = [Job(name, name, arch, rows=n) for name in formats.TYPES for arch in PLAIN for n in ROWS]
    made += [Job(name, name, arch, rows=n) for name in KINDS for arch in REST for n in (4, 16)]
    for name, dim in stored:
        if dim != 128:
            made += [Job(name, name, arch, dim, n) for arch, n in ((90, 16), (80, 4), (86, 8))]
    # a pair of codecs, what else is compiled in, other queries
    made += [Job(k, v, 90) for k, v in zip(KINDS, KINDS[1:] + KINDS[:1], strict=True)]
    made += [Job(name, name, 90, softcap=True, rows=n) for name in KINDS for n in (4, 16)]
    made += [Job(name, name, 90, one_tile=False) for name in KINDS]
    made += [Job("q8_0", "q8_0", arch, dtype=dtype) for arch in PLAIN for dtype in DTYPES]
    return made


DTYPES = ("float16", "float32")


def merges() -> list[Job]:
    """Every merge."""
    return [
        Job(codec, codec, arch, dim, n, merge_warps=warps)
        for codec in ("q8_0", "iso4")  # as values are stored, and turned
        for arch in ARCHS
        for dim, n in zip(EMULATED.dims, ROWS, strict=True)
        for warps in decode.MERGE_WARPS
        if dim in EMULATED.dims_of(codec)
    ]


@pytest.fixture(scope="module")
def kernels() -> list[Compiled]:
    return run([*jobs(), *merges()])


def test_every_codec_is_compiled_for_every_kind_of_gpu(kernels: list[Compiled]) -> None:
    assert set(SHARED_KIB) == set(ARCHS) == {c.job.arch for c in kernels}
    made = {(c.job.k, c.job.dim, c.rows) for c in kernels}
    for name in formats.TYPES:
        assert {(name, 128, n) for n in ROWS} <= made
        assert {dim for codec, dim, _ in made if codec == name} == set(EMULATED.dims_of(name))


def test_as_many_blocks_as_shall_run_fit_into_the_registers(kernels: list[Compiled]) -> None:
    for c in kernels:
        assert 0 < c.resources.registers <= c.registers_left, c


def test_shared_memory_is_what_the_launch_adds(kernels: list[Compiled]) -> None:
    for c in kernels:
        assert c.resources.shared_bytes == 0, c


def test_few_registers_are_spilled(kernels: list[Compiled]) -> None:
    spilling = set()
    for c in kernels:
        job, taken = c.job, c.resources
        if job.merge_warps:
            continue
        known = 0
        if job.dim == 128:
            known = sum(SPILLED.get(name, 0) for name in {job.k, job.v})
        if job.dim == 256 and c.rows == 16:
            known = WIDE_SPILLED
        assert taken.spill_load_bytes <= known, c
        assert taken.spill_store_bytes <= taken.spill_load_bytes, c
        # nothing else lies there: no array is indexed by what is not known before
        assert taken.stack_bytes <= -(-taken.spill_store_bytes // 8) * 8, c
        if taken.spill_load_bytes and job.dim == 128 and job.k == job.v:
            spilling.add(job.k)
    assert spilling == set(SPILLED), "a codec that does not spill needs no limit"


def test_many_warps_of_merges_run_at_once(kernels: list[Compiled]) -> None:
    found = [c for c in kernels if c.job.merge_warps]
    assert len(found) == len(merges())
    for c in found:
        # Some multiprocessors take too few blocks for so many of one warp.
        if c.job.merge_warps > 1:
            assert c.resources.registers * MERGING <= REGISTERS, c
        assert c.resources.spill_load_bytes <= (MERGE_SPILLED if c.job.arch >= 100 else 0), c


def test_a_text_that_does_not_compile_is_told() -> None:
    with pytest.raises(RuntimeError, match="q5_0"):
        run([Job("q5_0", "q5_0", 90)])
    assert "q5_0" not in kvq_codecs.names()
