"""The header of a GGUF file, read in well under a second whatever its vocabulary's size.

The gguf package makes an array for each word of the vocabulary, which takes longer than reading
all weights; its block formats are used as they are (`Tensor.values`).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, dequantize

from kvq_cli.config import ConfigError

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


class GgufError(ConfigError):
    """A file that is not a whole, readable GGUF file, or holds what kvq cannot convert."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where a tensor lies in its file.

    Attributes
    ----------
    shape : the slowest axis first
    start : bytes from the start of the file
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        block_values, block_bytes = GGML_QUANT_SIZES[self.kind]
        return prod(self.shape) // block_values * block_bytes


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A file's metadata and the places of its tensors."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model family."""
        return str(self.metadata["general.architecture"])

    def field(self, key: str) -> Any:
        """The architecture's value under `key` (without its prefix); None when absent."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def values(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """A tensor's values as float32, blocks decoded."""
        tensor = self.tensors[name]
        raw = np.fromfile(self.path, np.uint8, count=tensor.nbytes, offset=tensor.start)
        if tensor.kind is GGMLQuantizationType.F32:
            return raw.view("<f4").reshape(tensor.shape)
        if tensor.kind is GGMLQuantizationType.F16:
            return raw.view("<f2").astype(np.float32).reshape(tensor.shape)
        try:
            return np.asarray(dequantize(raw, tensor.kind), np.float32).reshape(tensor.shape)
        except NotImplementedError:
            raise GgufError(
                f"{self.path}: tensor {name} is {tensor.kind.name}, which cannot be decoded"
            ) from None


def read_gguf(path: Path) -> GgufFile:
    """Read a file's header and check that its tensors are all there.

    Raises
    ------
    GgufError : not a GGUF file, cut short, or of a kind that cannot be read
    OSError : the file cannot be opened
    """
    size = path.stat().st_size
    if size < 24:
        raise GgufError(f"{path} is not a GGUF file: it has {size} bytes")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise GgufError(f"{path} is not a GGUF file: it starts with {data[:4]!r}")
        try:
            found = _parse(path, _Cursor(data))
        except struct.error:
            raise GgufError(f"{path} is cut short: its header goes past its {size} bytes") from None
        except (ValueError, KeyError) as error:
            raise GgufError(f"{path} is damaged or of an unknown kind: {error}") from error
    end = max((t.start + t.nbytes for t in found.tensors.values()), default=0)
    if end > size:
        raise GgufError(
            f"{path} is cut short: its tensors end at byte {end}, the file at {size}; "
            "fetch it again"
        )
    return found


def _parse(path: Path, cursor: _Cursor) -> GgufFile:
    cursor.position = 4
    version = cursor.number("I")
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version}; versions 2 and 3 are read")
    num_tensors, num_fields = cursor.number("Q"), cursor.number("Q")
    metadata = dict(cursor.field() for _ in range(num_fields))
    if "general.architecture" not in metadata:
        raise ValueError("it does not name its architecture")
    places = [cursor.tensor() for _ in range(num_tensors)]
    step = int(metadata.get("general.alignment", 32))
    data_start = -(-cursor.position // step) * step
    tensors = {n: Tensor(n, shape, kind, data_start + offset) for n, shape, kind, offset in places}
    return GgufFile(path, metadata, tensors)


class _Cursor:
    """Reads little-endian fields one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        packed = struct.Struct(f"<{count}{code}")
        found = packed.unpack_from(self.data, self.position)
        self.position += packed.size
        return found

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def text(self) -> str:
        start = self.position + 8
        length = self.number("Q")
        if start + length > len(self.data):
            raise struct.error("text goes past the end")
        self.position = start + length
        return self.data[start : self.position].decode("utf-8", errors="replace")

    def texts(self, count: int) -> Iterator[str]:
        for _ in range(count):
            yield self.text()

    def field(self) -> tuple[str, Any]:
        return self.text(), self.value(GGUFValueType(self.number("I")))

    def value(self, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.STRING:
            return self.text()
        if kind is not GGUFValueType.ARRAY:
            return self.number(_SCALARS[kind])
        item_kind, count = GGUFValueType(self.number("I")), self.number("Q")
        if item_kind is GGUFValueType.STRING:
            return list(self.texts(count))
        return list(self.numbers(_SCALARS[item_kind], count))

    def tensor(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self.text()
        shape = tuple(reversed(self.numbers("Q", self.number("I"))))
        return name, shape, GGMLQuantizationType(self.number("I")), self.number("Q")
