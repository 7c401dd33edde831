"""What extend launches around dense kernels compiles everywhere, and what it takes is known.

The names of kernels that a packed past and its queries are converted by are their launcher's own.
"""

from __future__ import annotations

import pytest

import kvq_codecs

from .compiling import AMD, ARCHS, PROGRAM_KIB, Compiled, run

# All codecs without and with hardware for e4m3, a codec of each kind for others.
PLAIN, REST = (80, 90), (86, 89, 100, 120, *AMD)
SHAPED = (86, 90)
# Stack loads and stores, once a program: they have no loops.
SPILLED = {"nvfp4, head_dim 64": 2, "q4_0, float32 queries": 10}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    """Every codec at head_dim 128."""
    return run(["extend_dense_jobs"], PLAIN, tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    """A codec of each kind for the other architectures."""
    return run(["extend_dense_kinds_jobs"], REST, tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    """Other head_dims and dtypes, and parts, with little and with much shared memory."""
    return run(["extend_dense_shapes_jobs"], SHAPED, tmp_path_factory.mktemp("triton"))


def test_every_format_is_read_around_dense_kernels(
    kernels: list[Compiled], others: list[Compiled]
) -> None:
    made = {(k.job, k.arch) for k in kernels}
    codecs = set(kvq_codecs.names()) - {"fp32"}  # which goes elsewhere
    assert made == {(codec, arch) for codec in codecs for arch in PLAIN}
    assert {k.arch for k in kernels + others} == {*ARCHS, *AMD}
    for job, arch in {(k.job, k.arch) for k in kernels + others}:
        names = {k.kernel for k in kernels + others if (k.job, k.arch) == (job, arch)}
        assert names >= {"gather", "join"} and "attend_new" not in names
        assert (names == {"gather", "join"}) == (job == "bf16"), "rows of the queries' own type"


def test_nothing_is_spilled(
    kernels: list[Compiled], others: list[Compiled], shaped: list[Compiled]
) -> None:
    for k in kernels + others + shaped:
        assert k.local_accesses <= SPILLED.get(k.job, 0) and not k.in_loops, k


def test_p004_e4m3_is_converted_by_hardware_where_there_is_any(
    kernels: list[Compiled], others: list[Compiled]
) -> None:
    for k in kernels + others:
        if k.kernel == "gather" and k.job in ("fp8", "fp8_e4m3") and k.arch not in AMD:
            assert any("e4m3" in name for name in k.ptx) == (k.arch >= 89), k


def test_programs_fit_into_shared_memory(
    kernels: list[Compiled], others: list[Compiled], shaped: list[Compiled]
) -> None:
    for k in kernels + others + shaped:
        assert k.shared_bytes <= PROGRAM_KIB[k.arch] << 10, k
