"""By its key a process finds what another has compiled: keys must not depend on what ran before."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvq_attention.triton import jit

SCRIPT = Path(__file__).with_name("keys.py")
KERNELS = (
    *("attend.attend", "merge.merge", "store._store", "copy._copy"),
    *("extending.kernel.attend_new", "extending.merge.merge_parts", "extending.join.join"),
    *("extending.peaks.find_peaks", "extending.unpack.unpack", "extending.gather.gather"),
    "extending.halves.place",
)


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


def test_every_function_has_a_key_from_its_definition_on() -> None:
    """`kvq_attention.triton.jit` makes it; no file takes `triton.jit` itself."""
    assert len(keys()) > 100
    assert not [name for name, key in keys().items() if key is None]
    decorated = re.compile(r"^@triton\.jit\b", re.M)
    files = Path(jit.__file__).parent.rglob("*.py")
    assert [file.name for file in files if decorated.search(file.read_text())] == []


def incomplete(*first: str) -> list[str]:
    """Functions whose keys would be others if they were made by now."""
    return [name for name, each in told(*first).items() if each["whole"] != each["key"]]


def test_a_key_knows_the_constants_of_all_that_is_called() -> None:
    """None does where a function or a constant stands below one that names it."""
    assert incomplete() == []


def test_a_function_above_what_it_names_is_refused() -> None:
    def early(x: int) -> int:
        return later(x)  # type: ignore[name-defined, no-any-return]  # noqa: F821

    with pytest.raises(NameError, match=r"early stands above what it names: \['later'\]"):
        jit.jit(early)


def test_all_that_a_function_names_is_part_of_its_key() -> None:
    """What is not could change, and the kernel on disk would still be taken."""
    assert {name: each["unkeyed"] for name, each in told().items() if each["unkeyed"]} == {}


@pytest.mark.parametrize("first", ["extending.kernel", "attend", "store"])
def test_keys_do_not_depend_on_what_was_imported_first(first: str) -> None:
    assert keys(f"kvq_attention.triton.{first}") == keys()


def test_no_constant_of_a_kernel_has_another_s_name_and_another_value() -> None:
    """Triton puts such two in the order of addresses, which differ from process to process."""
    assert {name: each["twice"] for name, each in told().items() if each["twice"]} == {}


def test_a_launch_compares_no_constants() -> None:
    kernels = [f"kvq_attention.triton.{name}" for name in KERNELS]
    assert {name: told()[name]["compared"] for name in kernels} == dict.fromkeys(kernels, 0)


def test_the_script_for_sanitizers_changes_no_constant_of_a_key() -> None:
    """Kernels would be launched with the old ones; a GPU alone would show it."""
    assert incomplete("exercise_extend:smaller") == []
