"""Files that a run is to leave, tried before it measures anything."""

from __future__ import annotations

import os
from pathlib import Path

from kvq_attention.errors import AttentionError


def check_writable(option: str, path: Path) -> None:
    """Raise `AttentionError`, naming the option, unless a file can be written there.

    What the file holds stays, and one that is not there yet is not left behind.
    """
    real = Path(os.path.realpath(path))  # a link to nothing is no reason to remove the link
    try:
        known = real.exists()
        if known and not real.is_file() and not real.is_dir():
            return  # a pipe would notice that it was opened
        real.open("ab").close()
        if not known:
            real.unlink()
    except (OSError, ValueError) as error:
        raise _refused(option, path, error) from None


def write(option: str, path: Path, text: str) -> None:
    """Write a file; `AttentionError` says why it cannot be."""
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise _refused(option, path, error) from None


def _refused(option: str, path: Path, error: OSError | ValueError) -> AttentionError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    if path == Path():
        reason = "the name is empty or a directory"
    return AttentionError(f"{option} cannot be written to {str(path)!r}: {reason}")
