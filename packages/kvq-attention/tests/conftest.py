"""GPU tests are skipped visibly; a full run fails when a row of SUPPORT was not proven.

Without a GPU Triton's kernels run in its interpreter.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from kvq_attention import SUPPORT

from . import proofs
from .backends import gpu, third
from .interpreted import products_in_order

__all__ = ["gpu", "products_in_order", "third"]  # fixtures of several files

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, which is later

TESTS = Path(__file__).parent.resolve()
OUTCOMES = pytest.StashKey[dict[str, set[str]]]()
PROVES = "proves"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Every torch device there is to run on."""
    return str(request.param)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[OUTCOMES] = {}
    config.pluginmanager.register(_Recorder(config.stash[OUTCOMES]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in item.iter_markers(PROVES):
            test = getattr(item, "originalname", item.name)
            wrong = proofs.wrong_marker(SUPPORT, marker.args[0], test)
            if wrong:
                raise pytest.UsageError(wrong)
            # A property travels with the report, also from a worker process.
            item.user_properties.append((PROVES, marker.args[0]))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


class _Recorder:
    """Notes how the tests that prove rows ended."""

    def __init__(self, outcomes: dict[str, set[str]]) -> None:
        self.outcomes = outcomes

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            for name, row in report.user_properties:
                if name == PROVES:
                    self.outcomes.setdefault(str(row), set()).add(report.outcome)


def _unproven(config: pytest.Config) -> list[str]:
    where = config.invocation_params.dir
    if config.option.collectonly or hasattr(config, "workerinput"):
        return []
    if not proofs.is_full_run(config.args, vars(config.option), TESTS, where):
        return []
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return proofs.unproven(SUPPORT, config.stash[OUTCOMES], devices)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == pytest.ExitCode.OK and _unproven(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    missing = _unproven(config)
    if missing:
        terminalreporter.section("rows of SUPPORT that this run did not prove", red=True)
        for line in missing:
            terminalreporter.line(line)
