"""What a model's weights will take, from the headers of its files."""

from __future__ import annotations

from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open

from kvq_cli.models.gguf_file import read_gguf
from kvq_cli.models.source import ModelSource

# Types that loading casts to the one computed with; others keep their own.
_CAST = ("F64", "F32", "F16", "BF16")
_KEPT = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}


def weight_bytes(source: ModelSource, value_bytes: int) -> int:
    """Bytes of a model's weights once loaded; 0 where there are none to be seen.

    Parameters
    ----------
    value_bytes : of the type that is computed with

    Raises `GgufError` for a damaged file; loading tells of other files that are.
    """
    if source.kind == "gguf":
        tensors = read_gguf(source.path).tensors.values()
        return value_bytes * sum(prod(tensor.shape) for tensor in tensors)
    return sum(_file_bytes(file, value_bytes) for file in sorted(source.path.glob("*.safetensors")))


def _file_bytes(path: Path, value_bytes: int) -> int:
    total = 0
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                tensor = file.get_slice(name)
                kind = tensor.get_dtype()
                size = value_bytes if kind in _CAST else _KEPT.get(kind, 1)
                total += size * prod(tensor.get_shape())
    except (SafetensorError, OSError):
        return 0
    return total
