"""Encoded rows: the one type that crosses packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from array_api_compat import array_namespace, device

from kvq_codecs.bits import dtype_name, is_array
from kvq_codecs.errors import PlaneError
from kvq_codecs.spec import Plane, Spec

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
        name, wanted = self.spec.name, [p.name for p in self.spec.planes]
        self.spec.check(self.dim)
        if sorted(self.planes) != sorted(wanted):
            raise PlaneError(f"{name}: planes must be {wanted}, got {list(self.planes)}")
        for plane in self.spec.planes:
            self._check_items(plane)
        first = self.planes[wanted[0]]
        for other in wanted[1:]:
            array = self.planes[other]
            if array.shape[:-1] != first.shape[:-1]:
                raise PlaneError(
                    f"{name}: planes must share their leading shape; {other!r} has "
                    f"{list(array.shape[:-1])}, {wanted[0]!r} has {list(first.shape[:-1])}"
                )
            if _home(array) != _home(first):
                raise PlaneError(
                    f"{name}: planes must be of one library on one device; "
                    f"{other!r} is {_home(array)}, {wanted[0]!r} is {_home(first)}"
                )

    def _check_items(self, plane: Plane) -> None:
        array, what = self.planes[plane.name], f"{self.spec.name}: plane {plane.name!r}"
        if not is_array(array):
            raise PlaneError(
                f"{what} must be a NumPy, torch or CuPy array, got {type(array).__name__}"
            )
        if dtype_name(array) != plane.dtype:
            raise PlaneError(f"{what} must be {plane.dtype}, got {dtype_name(array)}")
        items = plane.row_items(self.dim)
        if len(array.shape) == 0 or array.shape[-1] != items:
            raise PlaneError(
                f"{what} at head_dim {self.dim} must have shape [..., {items}], "
                f"got {list(array.shape)}"
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


def _home(array: Array) -> str:
    library = array_namespace(array).__name__.removeprefix("array_api_compat.")
    return f"{library} on {device(array)}"
