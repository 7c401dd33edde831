"""Every store kernel compiles for every architecture, with the instructions that it should have."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvq_codecs

from .compiling import ARCHS, Compiled, run

SEEN = ("div.full", "approx", "fma", "ftz")


def inexact(kernel: Compiled) -> list[str]:
    """Instructions that may round otherwise than the oracle does."""
    return [name for name in kernel.ptx if any(part in name for part in SEEN)]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    return run(["store_jobs", "copy_jobs"], ARCHS, tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="module")
def stores(kernels: list[Compiled]) -> list[Compiled]:
    return [kernel for kernel in kernels if kernel.kernel == "_store"]


def test_p004_f05_every_format_compiles_for_every_architecture(stores: list[Compiled]) -> None:
    """Those too that an architecture has no hardware for: codes are bytes everywhere."""
    wanted = {(codec, arch) for codec in kvq_codecs.names() for arch in ARCHS}
    assert {(kernel.job, kernel.arch) for kernel in stores} == wanted
    assert len(stores) == len(wanted), "one launch a call"
    for kernel in stores:
        assert not [name for name in kernel.ptx if "e4m3" in name or "e2m1" in name]


def test_store_kernels_round_as_the_oracle_does(stores: list[Compiled]) -> None:
    assert not {(k.job, k.arch): found for k in stores if (found := inexact(k))}
    divide = {kernel.job for kernel in stores if "div.rn.f32" in kernel.ptx}
    assert divide == set(kvq_codecs.names()) - {"fp32", "bf16", "fp16"}
    assert {kernel.job for kernel in stores if "sqrt.rn.f32" in kernel.ptx} == {"iso3", "iso4"}


def test_the_search_for_inexact_instructions_finds_them(tmp_path: Path) -> None:
    (kernel,) = run(["careless_jobs"], [90], tmp_path)
    found = " ".join(inexact(kernel))
    assert all(part in found for part in ("div.full", "sqrt.approx", "fma.rn")), found


def test_nothing_is_spilled(kernels: list[Compiled]) -> None:
    assert not {(k.job, k.arch): k.stack_bytes for k in kernels if k.stack_bytes}
    assert all(0 < kernel.registers <= 168 for kernel in kernels)


def test_values_stay_in_the_threads_that_load_and_store_them(stores: list[Compiled]) -> None:
    """Loads and stores of 16 bytes, nothing through shared memory."""
    for kernel in stores:
        assert kernel.shared_bytes == 0, kernel
        wide = {f"ld.global.v{n}" for n in (4, 2)} if kernel.job == "fp32" else {"ld.global.v4"}
        assert any(name.startswith(tuple(wide)) for name in kernel.ptx), kernel
        if kernel.job != "iso3":  # its chunk of 32 values fills 8 bytes
            assert any(name.startswith("st.global.v4") for name in kernel.ptx), kernel


def test_pages_are_copied_in_words_of_16_bytes(kernels: list[Compiled]) -> None:
    copies = [kernel for kernel in kernels if kernel.kernel == "_copy"]
    assert {kernel.arch for kernel in copies} == set(ARCHS)
    for kernel in copies:
        assert {"ld.global.v2.b64", "st.global.v2.b64"} <= set(kernel.ptx), kernel
