"""By its key a process finds what another has compiled: keys must not depend on what ran before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("keys.py")
EXERCISES = ("exercise", "exercise_extend")  # beside this folder


@cache
def told(*first: str) -> dict[str, dict[str, Any]]:
    """Function → what the script says of it, where these modules were imported first."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(SCRIPT.parents[1]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *first]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def keys(*first: str) -> dict[str, str | None]:
    return {name: each["key"] for name, each in told(*first).items()}


def test_a_key_is_made_where_a_function_is_defined() -> None:
    """`kvq_attention.triton.jit.jit` does that, `triton.jit` does not."""
    assert len(keys()) > 100
    assert not [name for name, key in keys().items() if key is None]


def test_a_key_knows_the_constants_of_all_that_is_called() -> None:
    """None does where a function or a constant stands below one that names it."""
    assert [name for name, each in told().items() if each["whole"] != each["key"]] == []


@pytest.mark.parametrize("first", ["extending.kernel", "attend", "store"])
def test_keys_do_not_depend_on_what_was_imported_first(first: str) -> None:
    assert keys(f"kvq_attention.triton.{first}") == keys()


def test_no_constant_of_a_kernel_has_another_s_name_and_another_value() -> None:
    """Triton puts such two in the order of addresses, which differ from process to process."""
    assert {name: each["twice"] for name, each in told().items() if each["twice"]} == {}


@pytest.mark.parametrize("script", EXERCISES)
def test_scripts_for_sanitizers_change_no_constant_that_a_key_has_taken_in(script: str) -> None:
    """Triton refuses to launch such kernels; a GPU alone would show it."""
    assert {name: each["changed"] for name, each in told(script).items() if each["changed"]} == {}
