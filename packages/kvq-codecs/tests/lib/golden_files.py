"""The golden files, for tests of every package; a file's hash is checked before it is used."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

DIRECTORY = Path(__file__).parents[1] / "golden"


def listed_hashes() -> dict[str, str]:
    """File name → sha256, as SHA256SUMS lists them."""
    lines = (DIRECTORY / "SHA256SUMS").read_text().splitlines()
    return {name: digest for digest, name in (line.split() for line in lines)}


def checked(name: str) -> Path:
    """The file's path, its content being what SHA256SUMS says."""
    path = DIRECTORY / name
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest == listed_hashes()[name], f"{name} is not the golden file that was given"
    return path


@functools.cache
def arrays(name: str) -> Mapping[str, np.ndarray]:
    """The arrays of one .npz file."""
    with np.load(checked(name), allow_pickle=False) as archive:
        return dict(archive)
