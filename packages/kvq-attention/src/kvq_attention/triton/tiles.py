"""How a decode launch is shaped: tile, pipeline, chunks. Pure arithmetic on sizes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Config:
    """The shape of a decode launch.

    Attributes
    ----------
    tokens : tokens a tile, a power of two of at least 16
    warps : warps a program
    stages : tiles in flight: the loads of stages − 1 tiles run ahead of the arithmetic
    programs : programs a multiprocessor, which share its work
    chunk : tokens of a chunk, a multiple of `tokens`
    max_chunks : chunks a request is cut into at most; longer ones get longer chunks
    """

    tokens: int = 64
    warps: int = 4
    stages: int = 3
    programs: int = 4
    chunk: int = 512
    max_chunks: int = 128
    registers: int | None = None
