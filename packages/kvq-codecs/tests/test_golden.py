"""The golden files are the ones that were given."""

from __future__ import annotations

from . import golden_vectors


def test_every_golden_file_is_listed_and_unchanged() -> None:
    listed = golden_vectors.listed_hashes()
    present = {p.name for p in golden_vectors.DIRECTORY.iterdir()} - {"README.md", "SHA256SUMS"}
    assert present == set(listed)
    assert len(listed) == 8
    for name in listed:
        golden_vectors.checked(name)
