"""Kernels are loaded when they are wanted and launched on torch's stream with torch's tensors."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from kvq_attention import crossovers, support
from kvq_attention.cuda import module
from kvq_attention.errors import DeviceError, UnsupportedError
from kvq_attention.needs import Need

SOURCE = """
extern "C" __global__ void scale(
    float* out, const float* x, const float* bias, long long n, int step, float gain, double big) {
  int i = step * (blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) out[i] = gain * x[i] + float(big) + (bias ? bias[i] : 0.f);
}
struct Line {
  const float* x;
  float gain;
  int shift;
  long long n;
};
extern "C" __global__ void along(float* out, Line line, signed char bias) {
  int i = threadIdx.x;
  if (i < line.n) out[i] = line.gain * line.x[i] + line.shift + bias;
}
extern "C" __global__ void reverse(int* out, int n) {
  extern __shared__ int kept[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) kept[i] = out[i];
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = kept[n - 1 - i];
}
"""

GPU = torch.device("cuda", 0)


class Line(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("gain", ctypes.c_float),
        ("shift", ctypes.c_int),
        ("n", ctypes.c_longlong),
    )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes this process see GPUs of these compute capabilities."""

    def sees(*levels: tuple[int, int], hip: str | None = None) -> None:
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(levels))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(levels))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: levels[i])
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(module, "_trial", lambda: None)
        module._unavailable.cache_clear()

    yield sees
    module._unavailable.cache_clear()


def test_what_keeps_the_kernels_from_running_is_told(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine((9, 0))
    elsewhere = "its kernels run on cuda devices, not cpu"
    assert module.unavailable("cpu") == elsewhere
    machine()
    assert module.unavailable("cpu") == f"{elsewhere}, and torch finds no GPU here"
    machine((9, 0), hip="7.0")
    assert "this torch is built for ROCm" in str(module.unavailable("cuda"))
    machine()
    assert module.unavailable("cuda") == "torch finds no NVIDIA GPU"
    machine((9, 0), (7, 5))
    assert "8.0 or newer, cuda:1 has 7.5" in str(module.unavailable("cuda"))
    with pytest.raises(UnsupportedError, match=r"^cuda cannot run on cuda:0: .* has 7\.5; CUDA_V"):
        module.function(SOURCE, "scale", torch.device("cuda", 0))
    machine((8, 0), (12, 0))
    monkeypatch.setattr(module, "find_spec", lambda _name: None)
    missing = "CuPy is not installed; pip install 'kvq-attention[cuda]'"
    assert module.unavailable("cuda") == missing


def test_a_cupy_that_cannot_be_loaded_is_told(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine((9, 0))
    assert module.unavailable("cuda") is None
    machine((9, 0))
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    said = "CuPy cannot be used (ModuleNotFoundError: import of cupy.cuda halted"
    assert said in str(module.unavailable("cuda"))


def test_a_cupy_that_can_make_no_kernel_is_told(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be imported, and say which compiler it has, and still not drive the GPU."""

    def made(source: str, name: str, index: int) -> None:
        assert (source, name, index) == (module.TRIAL, "trial", 1)
        raise RuntimeError(f"cudaErrorInsufficientDriver:\n{'driver ' * 99}")

    trial = module._trial
    machine((9, 0), (9, 0))
    monkeypatch.setattr(module, "_trial", trial)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(module, "_made", made)
    reason = str(module.unavailable("cuda"))
    assert reason.startswith("CuPy cannot be used (RuntimeError: cudaErrorInsufficientDriver: driv")
    assert reason.endswith("…); pip install 'kvq-attention[cuda]'") and len(reason) < 400


def test_a_kernel_that_cannot_be_made_is_refused(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine((9, 0))

    def made(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(module, "_made", made)
    said = (
        r"^cuda cannot make its kernel scale for cuda:0 \(OSError: no space left .*\); triton or re"
    )
    with pytest.raises(UnsupportedError, match=said):
        module.function(f"{SOURCE} ", "scale", GPU)


def test_a_kernel_is_not_made_in_the_capture_of_a_graph(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, str, int]] = []
    monkeypatch.setattr(module, "_made", lambda *asked: made.append(asked) or len(made))
    capturing = True
    machine((9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    source = f"{SOURCE} // of this test"
    found = (
        r"^cuda: whether its kernels run cannot be found out while a CUDA graph is captured; make "
        "the same call once before the capture$"
    )
    with pytest.raises(UnsupportedError, match=found):
        module.function(source, "scale", GPU)
    capturing = False
    assert module.unavailable("cuda") is None
    capturing = True
    said = r"^cuda: its kernel scale cannot be made for cuda:0 while .* once before the capture$"
    with pytest.raises(UnsupportedError, match=said):
        module.function(source, "scale", GPU)
    assert made == []
    capturing = False
    kernel = module.function(source, "scale", GPU)
    capturing = True
    assert module.function(source, "scale", GPU) is kernel
    assert made == [(source, "scale", 0)]


def test_auto_does_not_go_on_to_another_in_the_capture_of_a_graph(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph would hold the other for good."""
    machine((9, 0))
    monkeypatch.setattr(crossovers, "fastest", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    need = Need("decode", "q4_0", "q4_0", 128, 128, 16, "cuda")
    with pytest.raises(UnsupportedError, match=r"make the same call once before the capture$"):
        support.pick("auto", [need])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert support.pick("auto", [need]) == "cuda"


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        ("AttributeError('module numpy has no attribute bool8')", "AttributeError: module numpy h"),
        (
            "ImportError('\\n====\\nlibnvrtc.so.13\\n\\n====')",
            "ImportError: ==== libnvrtc.so.13 ====",
        ),
        ("ValueError('numpy.dtype size changed')", "ValueError: numpy.dtype size changed"),
        ("SystemError('no exception set')", "SystemError: no exception set"),
        ("KeyError('CUDA_PATH')", "KeyError: 'CUDA_PATH'"),
        ("AssertionError", "AssertionError: "),
    ],
)
def test_whatever_breaks_in_cupy_is_told_in_one_line(
    machine: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    raised: str,
    told: str,
) -> None:
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text(f"raise {raised}")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
        monkeypatch.delitem(sys.modules, name)
    machine((9, 0))
    reason = str(support.unavailable("cuda", "cuda"))
    assert reason.startswith(f"CuPy cannot be used ({told.strip()}")
    assert reason.endswith("pip install 'kvq-attention[cuda]'") and "\n" not in reason


def test_a_module_without_a_spec_in_cupys_place_is_told(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    machine((9, 0))
    assert "CuPy cannot be used (ValueError: cupy.__spec__ is" in str(module.unavailable("cuda"))


def test_the_package_is_imported_without_cupy() -> None:
    code = "import sys, kvq_attention.cuda.module; sys.exit('cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_cupy_takes_torchs_streams() -> None:
    assert [module._stream(pointer).ptr for pointer in (0, 1234)] == [0, 1234]


class Kernel:
    """Notes what it is launched with, in place of CuPy's."""

    num_regs = 40
    max_dynamic_shared_size_bytes = 0

    def __init__(self) -> None:
        self.launched: list[Any] = []

    def __call__(self, *given: Any, shared_mem: int) -> None:
        self.launched.append((*given, shared_mem))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    stream = type("Stream", (), {"cuda_stream": 7})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _index: stream)
    monkeypatch.setattr(module, "_device", lambda _index: nullcontext())
    monkeypatch.setattr(module, "_stream", lambda _pointer: nullcontext())
    return Kernel()


def test_arguments_have_the_sizes_that_kernels_declare(kernel: Kernel) -> None:
    function = module.Function(kernel, 0)
    assert function.registers == 40
    function.launch((3, 2), 64, 0, [None, 5, -(2**40), 0.1, np.float64(0.1), np.int8(3), True])
    ((grid, block, values, shared_bytes),) = kernel.launched
    assert (grid, block, shared_bytes) == ((3, 2), (64,), 0)
    assert values == (0, 5, -(2**40), np.float32(0.1), 0.1, 3, 1)
    assert [type(value) for value in values[3:6]] == [np.float32, np.float64, np.int8]


def test_a_structure_is_passed_as_its_bytes(kernel: Kernel) -> None:
    line = Line(1 << 40, 0.5, -3, 900)
    module.Function(kernel, 0).launch((1,), 32, 0, [line])
    ((_, _, (value,), _),) = kernel.launched
    assert value.size == 1  # CuPy passes an array of one item by value
    assert value.tobytes() == bytes(line)


def test_shared_memory_is_allowed_when_it_grows(kernel: Kernel) -> None:
    function = module.Function(kernel, 0)
    allowed = []
    for shared_bytes in (1000, 100_000, 50_000):
        function.launch((1,), 32, shared_bytes, [])
        allowed.append(kernel.max_dynamic_shared_size_bytes)
    assert allowed == [1000, 100_000, 100_000]
    assert [launched[-1] for launched in kernel.launched] == [1000, 100_000, 50_000]


def test_nothing_is_launched_for_an_empty_grid_or_a_tensor_elsewhere(kernel: Kernel) -> None:
    function = module.Function(kernel, 0)
    function.launch((4, 0), 32, 0, [])
    with pytest.raises(DeviceError, match="on cpu was given to a kernel on cuda:0; all tensors"):
        function.launch((1,), 32, 0, [torch.zeros(1)])
    assert kernel.launched == []


@pytest.mark.gpu
def test_a_kernel_gets_its_arguments() -> None:
    x = torch.randn(1000, device=GPU)
    out, bias = torch.zeros_like(x), torch.randn_like(x)
    scale = module.function(SOURCE, "scale", GPU)
    assert module.function(SOURCE, "scale", x.device) is scale
    assert 0 < scale.registers < 64
    scale.launch((8,), 128, 0, [out, x, None, 900, 1, 0.5, np.float64(3.0)])
    assert torch.equal(out[:900], 0.5 * x[:900] + 3) and not out[900:].any()
    scale.launch((8,), 128, 0, [out, x, bias, 1000, 2, 1.0, np.float64(0.0)])
    assert torch.equal(out[::2], (x + bias)[::2])
    assert torch.equal(out[1:900:2], 0.5 * x[1:900:2] + 3)


@pytest.mark.gpu
def test_a_kernel_gets_structures() -> None:
    x, out = torch.randn(128, device=GPU), torch.zeros(128, device=GPU)
    line = Line(x.data_ptr(), 0.5, -3, 100)
    along = module.function(SOURCE, "along", GPU)
    along.launch((1,), 128, 0, [out, line, np.int8(-1)])
    assert torch.allclose(out[:100], 0.5 * x[:100] - 3 - 1) and not out[100:].any()


@pytest.mark.gpu
def test_a_kernel_gets_as_much_shared_memory_as_it_asks_for() -> None:
    reverse = module.function(SOURCE, "reverse", GPU)
    for n in (1000, 20_000):  # 80 kB
        x = torch.arange(n, dtype=torch.int32, device=GPU)
        reverse.launch((1,), 256, 4 * n, [x, n])
        assert torch.equal(x, torch.arange(n - 1, -1, -1, dtype=torch.int32, device=GPU))
    few, many = (reverse.resident_blocks(256, shared) for shared in (80_000, 1000))
    assert 1 <= few < many


@pytest.mark.gpu
def test_launches_are_ordered_on_torchs_current_stream() -> None:
    scale = module.function(SOURCE, "scale", GPU)
    x = torch.ones(1 << 24, device=GPU)
    out = torch.empty_like(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(50):
            x += 1  # takes long enough that a launch on another stream would come first
        args = [out, x, None, x.numel(), 1, 2.0, np.float64(0.0)]
        scale.launch((x.numel() // 256,), 256, 0, args)
        total = out.clone()
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(total, torch.full_like(x, 102.0))


@pytest.mark.gpu
def test_a_captured_launch_is_replayed() -> None:
    scale = module.function(SOURCE, "scale", GPU)
    x, out = torch.ones(256, device=GPU), torch.zeros(256, device=GPU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        twice = 2 * x
        scale.launch((1,), 256, 0, [out, twice, None, 256, 1, 1.5, np.float64(1.0)])
        after = out + 1
    assert not out.any(), "a capture runs nothing"
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, torch.full_like(out, 3 * value + 1))
        assert torch.equal(after, out + 1)


@pytest.mark.gpu
def test_a_kernel_that_a_capture_asks_for_first_is_refused_and_the_capture_goes_on() -> None:
    x, source = torch.ones(256, device=GPU), f"{SOURCE} // that only this test has"
    assert module.unavailable("cuda") is None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(UnsupportedError, match=r"make the same call once before the capture$"):
            module.function(source, "scale", GPU)
        twice = 2 * x
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(twice, 2 * x)
    assert module.function(source, "scale", GPU).registers > 0
