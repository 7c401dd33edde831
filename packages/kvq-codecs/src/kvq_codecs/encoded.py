"""Encoded rows: the one type that crosses packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from array_api_compat import array_namespace, device

from kvq_codecs.bits import dtype_name, is_array
from kvq_codecs.errors import PlaneError
from kvq_codecs.spec import Spec

Array = Any  # NumPy, torch or CuPy: whatever the caller brought


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Rows as a codec stores them, on host or device.

    Attributes
    ----------
    spec : the layout
    dim : values per row (head_dim)
    planes : name → array [..., items]. A one-item plane keeps its last axis (of length 1).
        All planes share the leading shape `lead`.
    """

    spec: Spec
    dim: int
    planes: Mapping[str, Array]

    def __post_init__(self) -> None:
        self.spec.check(self.dim)
        wanted = [p.name for p in self.spec.planes]
        if sorted(self.planes) != sorted(wanted):
            raise PlaneError(f"{self.spec.name}: planes must be {wanted}, got {list(self.planes)}")
        lead, homes = None, set()
        for p in self.spec.planes:
            array = self.planes[p.name]
            if not is_array(array):
                raise PlaneError(
                    f"{self.spec.name}: plane {p.name!r} must be a NumPy, torch or CuPy array, "
                    f"got {type(array).__name__}"
                )
            shape, dtype = tuple(array.shape), dtype_name(array)
            if dtype != p.dtype:
                raise PlaneError(
                    f"{self.spec.name}: plane {p.name!r} must be {p.dtype}, got {dtype}"
                )
            items = p.row_items(self.dim)
            if not shape or shape[-1] != items:
                raise PlaneError(
                    f"{self.spec.name}: plane {p.name!r} at head_dim {self.dim} must have shape "
                    f"[..., {items}], got {list(shape)}"
                )
            if lead is not None and shape[:-1] != lead:
                raise PlaneError(
                    f"{self.spec.name}: planes must share their leading shape; {p.name!r} has "
                    f"{list(shape[:-1])}, {wanted[0]!r} has {list(lead)}"
                )
            lead = shape[:-1]
            homes.add(f"{array_namespace(array).__name__.split('.')[-1]} on {device(array)}")
        if len(homes) > 1:
            raise PlaneError(
                f"{self.spec.name}: planes must be of one library on one device, "
                f"got {', '.join(sorted(homes))}"
            )

    @property
    def lead(self) -> tuple[int, ...]:
        """Shape without the row axis."""
        first = self.spec.planes[0].name
        return tuple(self.planes[first].shape[:-1])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded rows."""
        return (*self.lead, self.dim)

    def map(self, fn: Callable[[Array], Array]) -> Encoded:
        """The same rows with `fn` applied to each plane (index, gather, move)."""
        return Encoded(self.spec, self.dim, {n: fn(a) for n, a in self.planes.items()})
