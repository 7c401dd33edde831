import subprocess
import sys
from importlib.metadata import version

import pytest

COMPILER = "torch._dynamo"  # a second of imports by itself
HEAVY = ("torch", COMPILER, "transformers", "fastapi", "uvicorn", "safetensors", "kvq_attention")
REPORT = f"""
import atexit, sys
atexit.register(lambda: print(*(m for m in {HEAVY} if m in sys.modules), file=sys.stderr))
from kvq_cli.main import main
main()
"""


def kvq(*arguments):
    return subprocess.run(
        [sys.executable, "-c", REPORT, *arguments],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["formats"],
        ["plan", "--help"],
        ["check", "--help"],
        ["bench", "attention", "--help"],
        ["serve", "--help"],
        ["serve", "--nope"],
        ["ctl", "stats", "--help"],
        ["ctl", "cache", "--nope"],
    ],
)
def test_what_needs_no_model_imports_no_model_library(arguments):
    done = kvq(*arguments)
    assert done.returncode == (2 if "--nope" in arguments else 0)
    assert done.stderr.splitlines()[-1] == ""


def test_a_check_of_no_model_waits_for_no_compiler_and_no_models():
    done = kvq("check", "--device", "cpu", "--kv-cache-dtype", "q4_0")
    assert done.returncode == 0, done.stderr
    imported = done.stderr.splitlines()[-1].split()
    assert "torch" in imported
    assert not {COMPILER, "transformers"} & {*imported}


def test_the_version_is_that_of_all_four_packages():
    packages = ("kvq-cli", "kvq-attention", "kvq-pools", "kvq-codecs")
    assert kvq("--version").stdout.splitlines() == [f"{p} {version(p)}" for p in packages]


def test_help_lists_the_commands():
    said = kvq("--help").stdout
    assert "serve" in said and "formats" in said


@pytest.mark.parametrize("arguments", [["serve", "demo", "--port", "70000"], ["sevre"]])
def test_a_wrong_command_line_says_what_is_wrong(arguments):
    done = kvq(*arguments)
    assert done.returncode == 2
    assert arguments[-1] in done.stderr or "65535" in done.stderr
    assert "Traceback" not in done.stderr
