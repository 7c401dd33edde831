from dataclasses import replace

import pytest

from kvq_attention import launches
from kvq_attention.bench import ahead, plan
from kvq_attention.bench.cases import Formats, Spot


def test_every_op_runs_once_at_every_case():
    asked = plan(device="cpu", backend="reference", cases="2x20,1x100", codecs="q4_0")
    with launches.counting() as launched:
        ahead.run_once(asked, Spot(asked.shapes[0], 16, asked.formats[1]))
    ran = launched["reference"]
    assert (ran["store"], ran["copy_pages"], ran["decode"]) == (1, 1, 2)


def test_a_kernel_that_fails_ahead_is_left_to_the_measurement():
    served = plan(device="cpu", backend="reference", cases="1x20", codecs="bf16")
    unknown = replace(served, formats=(Formats("q5_0", "q5_0"),))
    with pytest.raises(ValueError, match="q5_0"):
        ahead.run_once(unknown, next(unknown.spots))
    ahead.compile_ahead(unknown, 1)
