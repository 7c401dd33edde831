"""Graphs without a GPU, and where tests of graphs run."""

from collections.abc import Callable

import pytest
import torch

from kvq_attention.support import Choice

REFERENCE = Choice("reference", "reference", "reference")
TRITON = Choice("triton", "triton", "triton")
PLACES = [
    pytest.param("cpu", REFERENCE, id="cpu"),
    pytest.param("cuda", TRITON, marks=pytest.mark.gpu, id="cuda"),
]

replayed: list[int] = []  # rows of each replay


def capture_here(
    run: Callable[[], torch.Tensor],
) -> tuple[Callable[[], None], torch.Tensor]:
    """What a graph does, without one: the tensors are what a replay reads and writes."""
    out = run().clone()

    def replay() -> None:
        replayed.append(len(out))
        out.copy_(run())

    return replay, out
