"""The golden files are the ones that were given."""

from __future__ import annotations

import golden_files


def test_every_golden_file_is_listed_and_unchanged() -> None:
    listed = golden_files.listed_hashes()
    present = {p.name for p in golden_files.DIRECTORY.iterdir()} - {"README.md", "SHA256SUMS"}
    assert present == set(listed)
    assert len(listed) == 8
    for name in listed:
        golden_files.checked(name)
