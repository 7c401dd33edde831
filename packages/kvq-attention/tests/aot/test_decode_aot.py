"""Every decode kernel compiles for every architecture, and what it takes of one is known."""

from __future__ import annotations

import re

import pytest

import kvq_codecs
from kvq_attention.triton.decode import WARPS
from kvq_attention.triton.tiles import shared_taken

from ..triton.sides import loads
from .compiling import ARCHS, PROGRAM_KIB, Compiled, run

# All codecs without and with hardware for e4m3; the architectures between have a few codecs each.
PLAIN, REST = (80, 90), (86, 89, 100, 120)
SHAPED = (86, 90)
DRIVER_BYTES = 1024

# Stack loads and stores, once a piece and outside the loops over tokens, by the compilers of Triton
# 3.6 and 3.7: tiles of 32 tokens make iso4 a twelfth faster than those of 16, which need no stack.
SPILLED = {("iso4", "attend"): 30, ("iso3", "attend"): 6, ("q6_0", "attend"): 2}
# and at other head_dims
SHAPED_SPILLED = {
    "iso3, head_dim 256": 34,
    "nvfp4, head_dim 64": 8,
    "q8_0, head_dim 64": 4,
    "k=fp16 v=iso3": 4,
}
# Sums of 256 float32 values a row and their product in three parts fill all registers.
WIDE = "fp32, head_dim 256"
WIDE_SPILLED = 600


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    """Every codec at head_dim 128."""
    return run(["decode_jobs"], PLAIN, tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    """A codec of each kind for the architectures between."""
    return run(["decode_kinds_jobs"], REST, tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    """Other head_dims and what a call may ask for, with little and with much shared memory."""
    return run(["decode_shapes_jobs"], SHAPED, tmp_path_factory.mktemp("triton"))


def test_every_format_is_decoded_on_every_architecture(
    kernels: list[Compiled], others: list[Compiled]
) -> None:
    made = {(k.job, k.arch, k.kernel) for k in kernels}
    assert made == {
        (codec, arch, kernel)
        for codec in kvq_codecs.names()
        for arch in PLAIN
        for kernel in ("attend", "merge")
    }
    assert {k.arch for k in kernels + others} == set(ARCHS)


def test_nothing_is_spilled_at_head_dim_128(
    kernels: list[Compiled], others: list[Compiled]
) -> None:
    for k in kernels + others:
        known = SPILLED.get((k.job, k.kernel), 0)
        assert k.local_accesses <= known and not k.in_loops, k
        assert bool(k.stack_bytes) == bool(k.local_accesses), k


def test_shapes_spill_little_and_not_in_loops(shaped: list[Compiled]) -> None:
    for k in shaped:
        if k.job != WIDE:
            assert k.local_accesses <= SHAPED_SPILLED.get(k.job, 0), k
            assert not k.in_loops, k


def test_the_search_for_spills_finds_them(shaped: list[Compiled]) -> None:
    wide = [k for k in shaped if k.job == WIDE and k.kernel == "attend"]
    assert len(wide) == len(SHAPED)
    for k in wide:
        assert k.stack_bytes and 0 < k.in_loops <= k.local_accesses <= WIDE_SPILLED, k


def test_one_launch_suffices_where_a_request_is_one_chunk(shaped: list[Compiled]) -> None:
    made = {job: {k.kernel for k in shaped if k.job == job} for job in {k.job for k in shaped}}
    assert made.pop("short, with sinks") == {"attend"}
    assert all(kernels == {"attend", "merge"} for kernels in made.values())


def test_p004_e4m3_is_converted_by_hardware_where_there_is_any(
    kernels: list[Compiled], others: list[Compiled]
) -> None:
    for k in kernels + others:
        converts = any("e4m3" in name for name in k.ptx)
        wanted = k.job in ("fp8", "fp8_e4m3") and k.kernel == "attend" and k.arch >= 89
        assert converts == wanted, k


def test_products_are_tensor_cores_and_loads_run_ahead(
    kernels: list[Compiled], others: list[Compiled]
) -> None:
    for k in kernels + others:
        if k.kernel == "attend":
            assert any(name.startswith("mma.sync") for name in k.ptx), k
            assert any(name.startswith("cp.async") for name in k.ptx), k


def test_the_merge_overlaps_from_hopper_on(kernels: list[Compiled], others: list[Compiled]) -> None:
    for k in kernels + others:
        verb = {"attend": "launch_dependents", "merge": "wait"}[k.kernel]
        found = {name for name in k.ptx if name.startswith("griddepcontrol")}
        assert found == ({f"griddepcontrol.{verb}"} if k.arch >= 90 else set()), k


def test_programs_fit_into_shared_memory(
    kernels: list[Compiled], others: list[Compiled], shaped: list[Compiled]
) -> None:
    for k in kernels + others + shaped:
        assert k.shared_bytes <= PROGRAM_KIB[k.arch] << 10, k


def test_as_many_programs_as_are_picked_fit_into_shared_memory(
    kernels: list[Compiled], others: list[Compiled], shaped: list[Compiled]
) -> None:
    checked = 0
    for k in kernels + others + shaped:
        named = re.fullmatch(r"(\w+)(?:, head_dim (\d+))?", k.job)
        if k.kernel != "attend" or not named or named[1] not in kvq_codecs.names():
            continue
        side = loads(int(named[2] or 128))[named[1]]
        numbers = k.numbers
        bound = shared_taken(side, side, numbers["TOKENS"], numbers["STAGES"], numbers["num_warps"])
        taken = k.shared_bytes + DRIVER_BYTES
        if k.job != WIDE:  # of 16 tokens: its sums are exchanged in more than is thought
            assert taken <= bound, k
        shared_bytes = (PROGRAM_KIB[k.arch] << 10) + DRIVER_BYTES
        programs = min(WARPS // numbers["num_warps"], shared_bytes // bound)
        assert programs >= 1 and programs * taken <= shared_bytes, k
        checked += 1
    assert checked > 2 * len(kvq_codecs.names())
