"""The ways in which a backend computes an op, where it has several."""

from __future__ import annotations

from dataclasses import dataclass

from kvq_attention.errors import AttentionError

# Formats whose rows are read as they are: a scratch would hold copies of them.
PLAIN = ("fp32", "bf16", "fp16")
# Triton's: each tile of rows decodes what it multiplies; decoded once; decoded for torch's kernels
LOOP, SCRATCH, DENSE = "loop", "scratch", "dense"


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

    def __post_init__(self) -> None:
        if type(self.rows) is not int or self.rows < 1:
            raise AttentionError(f"a route's rows must be an int of at least 1, got {self.rows!r}")
