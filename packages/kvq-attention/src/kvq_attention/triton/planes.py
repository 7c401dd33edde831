"""The planes of a cache as kernel arguments: a tensor and its strides."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvq_attention.errors import TensorError
from kvq_attention.verify import check_rows
from kvq_codecs import Encoded


@dataclass(frozen=True, slots=True)
class PlaneArgument:
    """A plane [P, Hkv, N, items] as a kernel takes it.

    Attributes
    ----------
    tensor : the plane, its items of the dtype that the kernel loads
    page, head, token : strides in those items
    """

    tensor: torch.Tensor
    page: int
    head: int
    token: int

    @property
    def strides(self) -> tuple[int, int, int]:
        """Of pages, heads and tokens."""
        return self.page, self.head, self.token

    @classmethod
    def of(cls, cache: Encoded, name: str, dtype: torch.dtype) -> PlaneArgument:
        """A plane read in items of `dtype`; `TensorError` where its layout does not allow that."""
        plane = cache.planes[name]
        where = f"plane {name!r} of a {cache.spec.name} cache"
        check_rows(where, plane)
        if plane.dtype == dtype:
            return cls(plane, *plane.stride()[:3])
        ratio = dtype.itemsize // plane.dtype.itemsize
        strides = plane.stride()[:3]
        if not fits(plane, dtype):
            raise TensorError(
                f"{where} is read {dtype.itemsize} bytes at a time, so its storage offset "
                f"({plane.storage_offset()}), strides {list(strides)} and items a row "
                f"({plane.shape[3]}) must be multiples of {ratio}"
            )
        page, head, token = (stride // ratio for stride in strides)
        return cls(plane.view(dtype), page, head, token)


def fits(plane: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a plane's rows can be read in items of `dtype`, a multiple of its own."""
    ratio = dtype.itemsize // plane.dtype.itemsize
    numbers = (*plane.stride()[:3], plane.storage_offset(), plane.shape[3])
    return plane.data_ptr() % dtype.itemsize == 0 and not any(n % ratio for n in numbers)
