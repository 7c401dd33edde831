"""Work that other processes do ahead, whose results are on disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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


def test_each_has_one_thread(tmp_path: Path) -> None:
    """More of several processes would wait for each other's: 22 times as long on two cores."""
    path = tmp_path / "threads"
    text = f"import torch; open({str(path)!r}, 'w').write(str(torch.get_num_threads()))"
    compiling.ahead(1, exec, [(text,)])
    assert path.read_text() == "1"


@pytest.mark.parametrize("importing", [False, True])
@pytest.mark.parametrize("to_all", [False, True])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_they_end_with_who_asked(
    end: signal.Signals, to_all: bool, importing: bool, tmp_path: Path
) -> None:
    """An interrupt, which a terminal sends to all, says one thing, whatever they are at."""
    began = tmp_path / "began"
    work = f"import time; open({str(began)!r}, 'w').close(); time.sleep(60)"
    script = (
        "import signal; from kvq_attention import compiling; "
        # what a shell starts in the background ignores it
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"compiling.ahead(2, exec, [({work!r},)] * 3)"
    )
    asking = subprocess.Popen(
        [sys.executable, "-c", script], start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    with asking, ended(asking):
        wait_for(lambda: len(workers(asking.pid)) == 2 and (importing or began.exists()))
        found = workers(asking.pid)
        (os.killpg if to_all else os.kill)(asking.pid, end)
        said = asking.communicate(timeout=20)[1]
        wait_for(lambda: not any(map(alive, found)))
        if end == signal.SIGINT:  # killed, it may leave a child that had yet to hear what to do
            assert said.count("Traceback") == 1, said


@contextmanager
def ended(asking: subprocess.Popen[str]) -> Iterator[None]:
    """Nothing of its session is left, whatever came of it."""
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(asking.pid, signal.SIGKILL)


def workers(session: int) -> list[int]:
    """The processes of a session that began to be somebody's."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            process = int(entry.name)
            if os.getsid(process) == session and b"spawn_main" in (entry / "cmdline").read_bytes():
                found.append(process)
    return found


def wait_for(true: Callable[[], bool]) -> None:
    """Until it is, or a minute has passed."""
    stop = time.monotonic() + 60
    while not true():
        assert time.monotonic() < stop
        time.sleep(0.05)


def alive(process: int) -> bool:
    """Whether it runs: one that nobody has waited for yet does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state.rpartition(") ")[2][0] != "Z"


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
