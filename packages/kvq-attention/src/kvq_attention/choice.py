"""The operations, and which backend serves each of them for a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MODEL_OPS = ("store", "decode", "extend")
OPS = (*MODEL_OPS, "copy_pages")
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Choice:
    """The backends that serve a model, op by op.

    Attributes
    ----------
    store, decode, extend : the backend of each op
    passed_over : what kept `auto` from a backend that it would have preferred, in words
    measured : ops whose backend `auto` took by measurement
    """

    store: str
    decode: str
    extend: str
    passed_over: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()

    def by_op(self) -> dict[str, str]:
        """Op → backend."""
        return {op: getattr(self, op) for op in MODEL_OPS}

    def told(self, op: str) -> str:
        """What to tell `ops`: the op's backend, or "auto" where a single call may go elsewhere."""
        backend: str = getattr(self, op)
        return AUTO if op in self.measured else backend

    def __str__(self) -> str:
        """In words: `reference`, or `triton for store and decode, reference for extend`."""
        ops: dict[str, list[str]] = {}
        for op, backend in self.by_op().items():
            ops.setdefault(backend, []).append(op)
        if len(ops) == 1:
            return self.store
        return ", ".join(f"{backend} for {listed(served)}" for backend, served in ops.items())


def listed(words: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last
