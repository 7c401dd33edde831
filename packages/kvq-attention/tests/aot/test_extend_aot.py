"""Every extend kernel compiles, for AMD's GPUs too, and what it takes of one is known."""

from __future__ import annotations

import pytest

import kvq_codecs

from .compiling import AMD, PROGRAM_KIB, Compiled, run

# All codecs for one architecture, a codec of each kind for others.
PLAIN, REST = (90,), (80, 100, *AMD)
# Sums and products of float32 fill all registers, as do rows of 256 values.
WIDE = ("fp32", "bf16, fp16 queries")
# Stack loads and stores in loops, by the compilers of Triton 3.7
SPILLED = {"iso4": 2, "scratch": 2}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    """Every codec at head_dim 128."""
    return run(["extend_jobs"], PLAIN, tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    """A codec of each kind, and a scratch, for the other architectures."""
    return run(["extend_kinds_jobs"], REST, tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    """Other head_dims and what a call may ask for."""
    return run(["extend_shapes_jobs"], PLAIN, tmp_path_factory.mktemp("triton"))


def test_every_format_is_extended_over(kernels: list[Compiled], others: list[Compiled]) -> None:
    made = {(k.job, k.kernel) for k in kernels}
    assert made == {
        (c, kernel) for c in kvq_codecs.names() for kernel in ("attend_new", "merge_parts")
    }
    assert {k.arch for k in others} == set(REST)
    assert {k.kernel for k in others if k.job == "scratch"} == {"unpack", "attend_new"}


def test_one_side_may_be_unpacked_alone(shaped: list[Compiled]) -> None:
    for side in ("K", "V"):
        made = [k.kernel for k in shaped if k.job == f"scratch of {side}"]
        assert sorted(made) == ["attend_new", "unpack"]


def test_no_loop_spills_at_head_dim_128(kernels: list[Compiled], shaped: list[Compiled]) -> None:
    for k in kernels + shaped:
        if "head_dim 256" not in k.job and k.job not in WIDE:
            assert k.in_loops <= SPILLED.get(k.job, 0), k


def test_products_are_those_of_tensor_cores(
    kernels: list[Compiled], others: list[Compiled]
) -> None:
    """No kernel is empty, either: of some tiles Triton 3.7 makes one that returns at once."""
    products = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 942: "v_mfma"}
    for k in kernels + others:
        if k.kernel == "attend_new" and (k.job, k.arch) != ("fp32", 100):
            assert any(name.startswith(products[k.arch]) for name in k.ptx), k


def test_programs_fit_into_shared_memory(
    kernels: list[Compiled], others: list[Compiled], shaped: list[Compiled]
) -> None:
    for k in kernels + others + shaped:
        assert k.shared_bytes <= PROGRAM_KIB[k.arch] << 10, k
