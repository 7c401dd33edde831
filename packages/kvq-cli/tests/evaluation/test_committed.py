"""What was measured of real models and is published beside the pages that tell it."""

import json
from pathlib import Path

import numpy as np
import pytest

import kvq_codecs
from kvq_cli.evaluation.evidence import HARMFUL, HARMLESS, RUINS, Evidence

RECORDS = Path(__file__).parents[4] / "docs" / "benchmarks"
SMOLLM2, GEMMA = "eval-smollm2-cpu", "eval-gemma3-cpu"

pytestmark = pytest.mark.skipif(
    not RECORDS.is_dir(), reason="records are in the repository, not in an sdist"
)


def published(name):
    return json.loads((RECORDS / f"{name}.json").read_text())


def kl(record, name):
    return next(row["kl_mean"] for row in published(record)["rows"] if row["format"] == name)


@pytest.mark.parametrize(
    ("record", "worse", "better", "times"),
    [
        # integers are far ahead of floats at the same bytes
        (SMOLLM2, "fp8", "q8_0", 4),
        # a scale for 16 values is ahead of one for 32
        (SMOLLM2, "q4_0", "nvfp4", 1.3),
        # keys cost several times what values cost: 8 bits for them are nearly 8 bits for both
        *[(model, "k=q4_0,v=q8_0", "k=q8_0,v=q4_0", 3) for model in (SMOLLM2, GEMMA)],
        *[(model, "q4_0", "k=q8_0,v=q4_0", 4) for model in (SMOLLM2, GEMMA)],
        (GEMMA, "q4_0", "nvfp4", 1.3),
        (GEMMA, "fp8", "q8_0", 4),
        (GEMMA, "iso3", "iso4", 1.3),
        (GEMMA, "k=iso4,v=q8_0", "k=q8_0,v=iso4", 3),
        (SMOLLM2, "0-1:bf16,2-29:q4_0", "k=q8_0,v=q4_0", 3),
        # rotations of four values collapse where keys stand out most
        (GEMMA, "iso4", "q4_0", 5),
        (GEMMA, "q4_0", "q8_0", 100),
    ],
)
def test_orders_that_the_pages_tell(record, worse, better, times):
    assert kl(record, worse) > times * kl(record, better)


def test_p144_four_bit_floats_are_held_to_a_small_model_beside_eight_bit_ones():
    """A small model shows what a format loses before a page offers it."""
    assert kl(SMOLLM2, "nvfp4") > 5 * kl(SMOLLM2, "fp8")


@pytest.mark.parametrize("record", [SMOLLM2, GEMMA])
def test_the_limits_of_harm_part_what_was_measured(record):
    assert kl(record, "q8_0") < HARMLESS < HARMFUL < kl(record, "q4_0") < RUINS
    assert Evidence.of(published(record)).warnings("q4_0")


def test_what_ruins_a_model_is_told_apart_from_what_harms_it():
    assert kl(GEMMA, "iso4") > 2 * RUINS
    (words,) = Evidence.of(published(GEMMA)).warnings("iso4")
    assert words.startswith("iso4 ruins this model")


def test_p131_heads_are_turned_and_rounded_each_for_itself():
    """A fixed turn of four values shares nothing between heads that one of them could spoil."""
    rng = np.random.default_rng(0)
    heads = rng.normal(size=(32, 2, 128)).astype(np.float32)
    heads[:, 1, 5] *= 80  # another head's spike
    for name in ("iso3", "iso4"):
        codec = kvq_codecs.get(name)
        together = codec.decode(codec.encode(heads))
        alone = codec.decode(codec.encode(heads[:, :1]))
        assert np.array_equal(together[:, :1], alone)
