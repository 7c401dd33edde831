"""What was measured of real models and is published beside the pages that tell it."""

import json
from pathlib import Path

import numpy as np
import pytest

import kvq_codecs
from kvq_cli.evaluation.evidence import HARMFUL, HARMLESS, RUINS, Evidence

RECORDS = Path(__file__).parents[4] / "docs" / "benchmarks"
SMALL = {"eval-smollm2-cpu": 64, "eval-gemma3-cpu": 256}  # record → head_dim

pytestmark = pytest.mark.skipif(
    not RECORDS.is_dir(), reason="records are in the repository, not in an sdist"
)


@pytest.fixture(scope="module", params=SMALL)
def published(request):
    """The rows of a record by format, and the model's head_dim."""
    record = json.loads((RECORDS / f"{request.param}.json").read_text())
    return {row["format"]: row for row in record["rows"]}, SMALL[request.param], record


def kl(rows, name):
    return rows[name]["kl_mean"]


def test_p144_every_format_has_passed_a_small_model_or_its_page_says_how_it_failed(published):
    """Small models show what a format loses: none is offered that was not tried on them."""
    rows, head_dim, _ = published
    storing = {
        name for name in kvq_codecs.names() if head_dim % kvq_codecs.get(name).spec.divisor == 0
    }
    assert storing <= rows.keys()
    assert {"k=q8_0,v=q4_0", "k=q4_0,v=q8_0"} <= rows.keys()


def test_p144_four_bit_floats_lose_more_than_eight_bit_ones(published):
    rows, _, _ = published
    assert kl(rows, "nvfp4") > 5 * kl(rows, "fp8")
    assert kl(rows, "nvfp4") < kl(rows, "q4_0")


def test_eight_bit_integers_are_far_ahead_of_eight_bit_floats(published):
    rows, _, _ = published
    assert kl(rows, "q8_0") < kl(rows, "fp8") / 4


def test_keys_cost_several_times_what_values_cost(published):
    rows, _, _ = published
    assert kl(rows, "k=q4_0,v=q8_0") > 2 * kl(rows, "k=q8_0,v=q4_0")
    assert kl(rows, "k=q8_0,v=q4_0") < kl(rows, "q4_0") / 2


def test_rotations_of_four_values_collapse_where_keys_stand_out_most():
    rows = json.loads((RECORDS / "eval-gemma3-cpu.json").read_text())["rows"]
    by_name = {row["format"]: row for row in rows}
    assert min(kl(by_name, "iso3"), kl(by_name, "iso4")) > 5 * kl(by_name, "q4_0")
    assert kl(by_name, "iso3") > RUINS < kl(by_name, "iso4")


def test_the_limits_of_harm_part_what_was_measured(published):
    """q8_0 and q6_0 below, 4 bits on both sides above; k=q8_0,v=q4_0 is between."""
    rows, _, record = published
    assert kl(rows, "q8_0") < HARMLESS < kl(rows, "k=q8_0,v=q4_0") < HARMFUL < kl(rows, "q4_0")
    assert Evidence.of(record).warnings("q4_0")


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
