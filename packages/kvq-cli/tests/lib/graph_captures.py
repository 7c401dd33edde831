"""Graphs without a GPU, and where tests of graphs run."""

import gc
from collections.abc import Callable

import pytest
import torch

from kvq_attention.support import Choice
from kvq_cli.engine.graphs import OnGpu

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


def check_a_capture_that_the_driver_ends() -> None:
    """As by a wait that torch does not see: nothing of it stays, and others can be made."""
    import cupy

    capture, ones = OnGpu(), torch.ones(1 << 20, device="cuda")
    replay, twice = capture(lambda: ones * 2)
    before = torch.cuda.memory_reserved()

    def waits() -> torch.Tensor:
        made = ones.repeat(32)
        cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream).synchronize()
        return made

    with pytest.raises(Exception, match=r"(?i)captur"):
        capture(waits)
    torch.cuda.empty_cache()  # where torch thinks that a capture is under way, it refuses
    replay()
    assert twice.eq(2).all()
    again, more = capture(lambda: ones + 2)
    again()
    assert more.eq(3).all() and ones.cpu().pin_memory().eq(1).all()
    del replay, twice, again, more, capture
    gc.collect()  # of what failed, errors hold frames
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < before
