"""The ways in which a backend computes an op, where it has several."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Route:
    """One of a backend's ways to extend.

    Attributes
    ----------
    name : the backend's own name of it
    rows : query rows (query token × head of a KV head's group) of a request from which on it is
        taken
    """

    name: str
    rows: int = 1
