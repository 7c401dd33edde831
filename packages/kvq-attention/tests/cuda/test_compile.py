"""Texts are put together from headers and compiled for GPUs that are not there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvq_attention.cuda import compile as compiler
from kvq_attention.errors import UnsupportedError

FILES = {
    "kernel.cu": """\
#pragma once
#include "numbers.cuh"
  #  include "formats/half.cuh"
// #include "missing.cuh"
#include FORMAT
extern "C" __global__ void add(float* out, int n) { out[n] += TWO + HALF + GAIN; }
""",
    "numbers.cuh": "#pragma once\nconstexpr float TWO = 2;",
    "formats/half.cuh": '#pragma once\n#include "numbers.cuh"\nconstexpr float HALF = TWO / 4;\n',
}

# Arrays that are indexed at run time lie on the stack; 80 floats do not fit in 32 registers.
KERNELS = """
extern "C" __global__ void plain(float* a) { a[threadIdx.x] *= 2; }
extern "C" __global__ void stack(const float* a, float* b, int n) {
  __shared__ float s[7];
  float t[64];
  for (int i = 0; i < n; i++) t[i] = a[i];
  s[threadIdx.x] = t[n / 2];
  __syncthreads();
  b[threadIdx.x] = s[3] + t[n];
}
extern "C" __global__ void __launch_bounds__(1024, 2) spills(const float* a, float* b) {
  float t[80];
#pragma unroll
  for (int i = 0; i < 80; i++) t[i] = a[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 80; i++) b[i] = t[i] * t[79 - i];
}
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(compiler, "SOURCE", tmp_path)
    return tmp_path


def test_headers_are_written_in_once_and_defines_come_first(files: Path) -> None:
    text = compiler.source("kernel.cu", {"GAIN": 3, "FORMAT": '"formats/half.cuh"'})
    assert text.startswith('#define GAIN 3\n#define FORMAT "formats/half.cuh"\n#line 1 "kernel.cu"')
    assert text.count("TWO = 2") == text.count("HALF = TWO / 4") == 1
    assert text.index("TWO = 2") < text.index("HALF = TWO / 4") < text.index("void add")
    assert "pragma once" not in text
    includes = [line for line in text.splitlines() if "include" in line]
    assert includes == ['// #include "missing.cuh"']


def test_the_text_compiles_and_an_error_names_file_and_line(files: Path) -> None:
    text = compiler.source("kernel.cu", {"GAIN": 3, "FORMAT": '"formats/half.cuh"'})
    assert list(compiler.resources(compiler.compile(text, 90))) == ["add"]
    with pytest.raises(RuntimeError, match=r"for sm_90\nkernel.cu\(6\): error: .*GAIN"):
        compiler.compile(compiler.source("kernel.cu", {"FORMAT": '"numbers.cuh"'}), 90)
    (files / "formats/half.cuh").write_text('#include "numbers.cuh"\n\nint HALF = TOO / 4;\n')
    text = compiler.source("kernel.cu", {"GAIN": 3, "FORMAT": '"numbers.cuh"'})
    with pytest.raises(RuntimeError, match=r"formats/half.cuh\(3\): error: .*TOO"):
        compiler.compile(text, 90)


def test_a_missing_header_and_a_missing_macro_are_errors(files: Path) -> None:
    with pytest.raises(KeyError, match="FORMAT"):
        compiler.source("kernel.cu", {"GAIN": 3})
    with pytest.raises(FileNotFoundError, match=r"q5_0\.cuh"):
        compiler.source("kernel.cu", {"FORMAT": '"formats/q5_0.cuh"'})


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_what_a_kernel_takes_is_read_from_the_log(arch: int) -> None:
    cubin = compiler.compile(KERNELS, arch)
    assert cubin.code.startswith(b"\x7fELF") and cubin.arch == arch
    found = compiler.resources(cubin)
    assert found.keys() == {"plain", "stack", "spills"}
    plain, stack = found["plain"], found["stack"]
    assert 0 < plain.registers <= 16
    assert (plain.stack_bytes, plain.shared_bytes, plain.spill_store_bytes) == (0, 0, 0)
    assert stack.stack_bytes >= 64 * 4 and stack.shared_bytes == 7 * 4
    assert (stack.spill_store_bytes, stack.spill_load_bytes) == (0, 0)


def test_spills_are_counted() -> None:
    spills = compiler.resources(compiler.compile(KERNELS, 80))["spills"]
    assert spills.registers == 32
    assert spills.stack_bytes >= spills.spill_store_bytes > 0
    assert spills.spill_load_bytes > 0


def test_without_cupy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'kvq-attention\[cuda\]'"):
        compiler.compile(KERNELS, 90)
