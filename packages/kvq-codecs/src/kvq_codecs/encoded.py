"""Encoded rows: the one type that crosses packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from array_api_compat import array_namespace

from kvq_codecs.bits import dtype_name, place, plain
from kvq_codecs.errors import PlaneError, check_kind
from kvq_codecs.spec import Plane, Spec

Array = Any  # NumPy, torch or CuPy: whatever the caller brought


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Encoded:
    """Rows as a codec stores them, on host or device.

    Attributes
    ----------
    spec : the layout
    dim : values per row (head_dim)
    planes : name → array [..., items]. A one-item plane keeps its last axis (of length 1).
        All planes share the leading shape `lead`. The mapping is a read-only copy of the one
        given; the arrays share its memory.

    Raises `PlaneError`, and `RowError` for a dim that the codec cannot store.
    """

    spec: Spec
    dim: int
    planes: Mapping[str, Array]

    def __post_init__(self) -> None:
        check_kind(self.spec, Spec, "spec", PlaneError)
        name, wanted = self.spec.name, [p.name for p in self.spec.planes]
        dim = self.spec.check(self.dim)
        check_kind(self.planes, Mapping, f"{name}: planes", PlaneError)
        if self.planes.keys() != set(wanted):
            raise PlaneError(f"{name}: planes must be {wanted}, got {list(self.planes)}")
        planes = {p.name: _checked(name, p, dim, self.planes[p.name]) for p in self.spec.planes}
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "planes", MappingProxyType(planes))
        first = planes[wanted[0]]
        for other in wanted[1:]:
            array = planes[other]
            if array.shape[:-1] != first.shape[:-1]:
                raise PlaneError(
                    f"{name}: planes must share their leading shape; {other!r} has "
                    f"{list(array.shape[:-1])}, {wanted[0]!r} has {list(first.shape[:-1])}"
                )
            alike = type(array) is type(first) and place(array) == place(first)
            if not alike and _home(array) != _home(first):
                raise PlaneError(
                    f"{name}: planes must be of one library on one device; "
                    f"{other!r} is {_home(array)}, {wanted[0]!r} is {_home(first)}"
                )

    def __reduce__(self) -> tuple[type[Encoded], tuple[Spec, int, dict[str, Array]]]:
        return Encoded, (self.spec, self.dim, dict(self.planes))  # a proxy cannot be pickled

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


def _checked(name: str, plane: Plane, dim: int, given: Any) -> Array:
    what = f"{name}: plane {plane.name!r}"
    array = plain(given, what, PlaneError)
    if dtype_name(array) != plane.dtype:
        raise PlaneError(
            f"{what} must be {plane.dtype}, got {dtype_name(array)}"
            + (" (not in native byte order)" if dtype_name(array)[0] in "<>" else "")
        )
    items = plane.row_items(dim)
    if len(array.shape) == 0 or array.shape[-1] != items:
        raise PlaneError(
            f"{what} at head_dim {dim} must have shape [..., {items}], got {list(array.shape)}"
        )
    return array


def _home(array: Array) -> str:
    library = array_namespace(array).__name__.removeprefix("array_api_compat.")
    return f"{library} on {place(array)}"
