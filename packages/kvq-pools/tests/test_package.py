"""What importing and installing the package brings."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from importlib import metadata

import kvq_pools


def test_the_example_of_the_package_runs() -> None:
    outcome = doctest.testmod(kvq_pools)
    assert outcome.attempted > 5
    assert outcome.failed == 0


def test_numpy_and_kvq_codecs_are_all_that_is_required() -> None:
    required = {re.match(r"[\w-]+", r)[0] for r in metadata.requires("kvq-pools")}
    assert required == {"kvq-codecs", "numpy"}


def test_import_brings_no_large_library() -> None:
    code = (
        "import sys, kvq_pools; "
        "print([m for m in ('torch', 'cupy', 'transformers', 'triton') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
