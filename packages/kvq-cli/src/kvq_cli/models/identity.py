"""Which model lies in a place: the same wherever its files are, another for other weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

SAMPLES, SAMPLE_BYTES = 64, 4096  # of each file of weights: any tuning changes most of its values


def identity(path: Path) -> str | None:
    """16 hex digits of the model in a directory, beside a config.json or in a GGUF file.

    None where there are no weights. Files are sampled, not read: it takes milliseconds, whatever
    the size of a model.
    """
    said = hashlib.sha256()
    if path.suffix.lower() == ".gguf":
        files = [path] if path.is_file() else []
    else:
        config = path if path.name == "config.json" else path / "config.json"
        files = sorted(config.parent.glob("*.safetensors")) if config.is_file() else []
        said.update(config.read_bytes() if files else b"")
    if not files:
        return None
    for file in files:
        said.update(_sampled(file))
    return said.hexdigest()[:16]


def _sampled(path: Path) -> bytes:
    """A file's size and parts of it, the first and the last among them."""
    size = path.stat().st_size
    said = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for part in range(SAMPLES + 1):
            file.seek(max(0, size - SAMPLE_BYTES) * part // SAMPLES)
            said.update(file.read(SAMPLE_BYTES))
    return said.digest()
