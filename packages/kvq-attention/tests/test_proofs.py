"""The gate of conftest.py: a row of SUPPORT whose test did not pass fails a full run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvq_attention import SUPPORT

from . import proofs

HERE = Path(__file__).parent
ROWS = SUPPORT[:2]
FIRST, SECOND = ROWS
CPU = ("cpu",)


def test_a_row_is_proven_when_its_test_passed_and_none_failed() -> None:
    passed, skipped = {"passed"}, {"skipped"}
    assert proofs.unproven(ROWS, {FIRST.id: passed, SECOND.id: passed | skipped}, CPU) == []
    (missing,) = proofs.unproven(ROWS, {FIRST.id: passed, SECOND.id: skipped}, CPU)
    assert missing == f"{SECOND.id}: {SECOND.proof} skipped"
    (missing,) = proofs.unproven(ROWS, {FIRST.id: passed | {"failed"}, SECOND.id: passed}, CPU)
    assert missing == f"{FIRST.id}: {FIRST.proof} failed and passed"
    assert proofs.unproven(ROWS, {}, CPU) == [f"{row.id}: {row.proof} did not run" for row in ROWS]


def test_a_row_of_devices_that_are_elsewhere_may_be_skipped_but_not_left_out() -> None:
    rows = [replace(FIRST, devices=("cuda",))]
    assert proofs.unproven(rows, {FIRST.id: {"skipped"}}, CPU) == []
    assert len(proofs.unproven(rows, {FIRST.id: {"skipped"}}, ("cpu", "cuda"))) == 1
    assert len(proofs.unproven(rows, {FIRST.id: {"skipped", "failed"}}, CPU)) == 1
    assert len(proofs.unproven(rows, {}, CPU)) == 1


def test_a_marker_names_a_row_that_names_its_test() -> None:
    assert proofs.wrong_marker(ROWS, FIRST.id, FIRST.proof) is None
    assert "no row of SUPPORT" in (proofs.wrong_marker(ROWS, "no.such", FIRST.proof) or "")
    wrong = proofs.wrong_marker(ROWS, FIRST.id, "test_other") or ""
    assert f"names {FIRST.proof}" in wrong


@pytest.mark.parametrize(
    ("args", "options", "full"),
    [
        (["pkg/tests"], {}, True),
        (["."], {"keyword": "", "ignore": None}, True),
        (["pkg", "other"], {}, True),
        (["pkg/tests/test_a.py"], {}, False),
        (["pkg/tests/test_a.py::test_b"], {}, False),
        (["other"], {}, False),
        (["pkg/tests"], {"keyword": "decode"}, False),
        (["pkg/tests"], {"markexpr": "not gpu"}, False),
        (["pkg/tests"], {"lf": True}, False),
    ],
)
def test_only_a_full_run_is_held_to_the_table(
    tmp_path: Path, args: list[str], options: dict[str, object], full: bool
) -> None:
    tests = tmp_path / "pkg" / "tests"
    assert proofs.is_full_run(args, options, tests, tmp_path) is full


def run_gated(where: Path, first: str, *options: str) -> int:
    """Run pytest on a folder with this conftest.py and a proof per row; `first` is a proof's body.

    The folder's name must be new to this process: its modules stay imported.
    """
    where.mkdir(exist_ok=True)
    settings = "[pytest]\naddopts = --import-mode=importlib\nmarkers =\n    gpu\n    proves(row)\n"
    (where.parent / "pytest.ini").write_text(settings)
    for name in ("conftest.py", "backends.py", "interpreted.py", "proofs.py"):
        (where / name).write_text((HERE / name).read_text())
    lines = ["import pytest"]
    for row in SUPPORT:
        body = first if row is FIRST else "pass"
        lines += [f"@pytest.mark.proves({row.id!r})", f"def {row.proof}(): {body}"]
    (where / "test_rows.py").write_text("\n".join(lines))
    quiet = ("-q", "-s", "-p", "no:cacheprovider", "-p", "no:faulthandler")
    return pytest.main([*quiet, *options, "-c", str(where.parent / "pytest.ini"), str(where)])


def test_the_gate_fails_the_session(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_gated(tmp_path / "gated_passing", "pass") == pytest.ExitCode.OK
    skipping = tmp_path / "gated_skipping"
    assert run_gated(skipping, "pytest.skip()", "-k", "test") == pytest.ExitCode.OK
    assert "rows of SUPPORT" not in capsys.readouterr().out

    assert run_gated(skipping, "pytest.skip()") == pytest.ExitCode.TESTS_FAILED
    printed = capsys.readouterr().out
    assert f"{FIRST.id}: {FIRST.proof} skipped" in printed
    assert SECOND.id not in printed
