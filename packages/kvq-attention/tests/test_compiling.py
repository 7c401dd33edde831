"""Work that other processes do ahead, whose results are on disk."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from kvq_attention import compiling, selfcheck
from kvq_attention.layer import Layer


def leaving(path: Path) -> tuple[list[str]]:
    """What `subprocess.run` is told to leave its caller's number, as a compiler leaves a kernel."""
    return (["sh", "-c", f"echo $PPID > '{path}'"],)


def test_all_is_done_in_other_processes_whatever_fails(tmp_path: Path) -> None:
    calls = [
        leaving(tmp_path / "a"),
        (["no such program"],),
        *(leaving(tmp_path / n) for n in "bc"),
    ]
    compiling.ahead(2, subprocess.run, calls)
    found = {path.name: int(path.read_text()) for path in tmp_path.iterdir()}
    assert set(found) == {"a", "b", "c"}
    assert os.getpid() not in found.values()


def test_a_process_that_dies_is_no_error_of_who_asked() -> None:
    compiling.ahead(1, os._exit, [(1,)] * 3)


@pytest.mark.parametrize(("jobs", "files"), [(0, ["a"]), (2, [])])
def test_nothing_is_started_for_nothing(
    jobs: int, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "ProcessPoolExecutor", None)
    compiling.ahead(jobs, subprocess.run, [leaving(tmp_path / name) for name in files])
    assert list(tmp_path.iterdir()) == []


def test_a_check_compiles_ahead_each_op_that_has_something_to_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Extends first, which take longest; and it finds the same as without."""
    asked = []
    monkeypatch.setattr(compiling, "ahead", lambda *given: asked.append(given))
    layer = Layer(2, 1, 32, 16)
    formats = [("q4_0", "q4_0"), ("bf16", "q8_0")]
    given = formats, layer, "cpu", torch.float32
    found = [selfcheck.run(*given, backend="reference", jobs=jobs) for jobs in (0, 3)]
    assert found[0] == found[1] and not any(outcome.problems for outcome in found[0])
    assert [list(calls) for _, _, calls in asked] == [[], []], "the reference has no kernels"
    chosen = {"store": "triton", "extend": "triton", "decode": "cuda", "copy_pages": "reference"}
    selfcheck.compile_ahead([(pair, layer, chosen) for pair in formats], "cuda", torch.half, 3)
    jobs, work, calls = asked[-1]
    assert (jobs, work) == (3, selfcheck.run_one)
    assert {(pair, *backends.items()) for pair, _, backends, _, _ in calls} == {
        (pair, (op, name)) for pair in formats for op, name in chosen.items() if op != "copy_pages"
    }
    assert [list(backends) for _, _, backends, _, _ in calls][:2] == [["extend"]] * 2
