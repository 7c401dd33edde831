"""The format that a cache gets when nobody names one, and contexts that cannot be had."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from geometries import shape
from published import CONFIGS

import kvq_codecs
from kvq_cli.automatic import automatic, check_context, room_for
from kvq_cli.choosing import choose_cache
from kvq_cli.config import ConfigError, ModelGeometry, geometry, parse_cache_dtype
from kvq_cli.evaluation.evidence import Evidence, Measured
from kvq_cli.ladder import LADDER
from kvq_cli.models.source import ModelSource
from kvq_cli.notes import state_notes
from kvq_cli.serve_options import ServeOptions
from kvq_pools import Budget

CPU, DTYPE = torch.device("cpu"), torch.bfloat16
MODEL = replace(geometry(CONFIGS["llama-3.1-8b"]), max_position=131072)
NARROW = shape(num_layers=8, head_dim=64, max_position=65536, windows=(None,) * 8)
CONTEXT = 32768


def room(free: int, model: ModelGeometry = MODEL, **options: Any):
    """Memory of which weights take nothing."""
    wanted = ServeOptions("m", memory_ratio=1.0, **options)
    found = room_for(ModelSource(Path("nowhere"), "directory", "m"), model, wanted, CPU, DTYPE)
    return replace(found, budget=Budget(free, free, 1.0))


def needed(name: str, model: ModelGeometry = MODEL, context: int = CONTEXT) -> int:
    """Bytes with which one request of a context just fits in a format."""
    found = room(1, model)
    options = replace(found.options, max_model_len=context)
    plan = choose_cache(name, model, options, CPU, DTYPE).plan
    limits = replace(found.limits, context=context)
    return plan.nbytes(context // 16) + limits.needs(model, context)


def test_each_rung_errs_more_and_takes_less():
    specs = [(kvq_codecs.get(k).spec, kvq_codecs.get(v).spec) for k, v in map(sides, LADDER)]
    sizes = [k.row_bytes(128) + v.row_bytes(128) for k, v in specs]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)
    rows = torch.randn(256, 128, generator=torch.Generator().manual_seed(0)).numpy()

    def error(name: str) -> float:
        codec = kvq_codecs.get(name)
        return float(((codec.decode(codec.encode(rows)) - rows) ** 2).mean())

    errors = [error(k) + error(v) for k, v in map(sides, LADDER)]
    assert errors == sorted(errors)


def sides(name: str) -> tuple[str, str]:
    cache = parse_cache_dtype(name)
    return cache.k, cache.v


@pytest.mark.parametrize("name", ["bf16", *LADDER])
def test_the_most_exact_format_in_which_the_asked_context_fits_is_taken(name):
    chosen, why = automatic(room(needed(name), max_model_len=CONTEXT))
    assert chosen == name
    assert "32,768 tokens of context" in why and f"{name} is taken for the KV cache" in why
    below, _ = automatic(room(needed(name) - 1, max_model_len=CONTEXT))
    rungs = ["bf16", *LADDER]
    assert below == rungs[min(rungs.index(name) + 1, len(LADDER))]


def test_what_fits_in_no_format_says_so():
    chosen, why = automatic(room(needed("iso3") - 1, max_model_len=CONTEXT))
    assert chosen == "iso3" and "fit in no format" in why


def test_a_context_that_nobody_asked_for_costs_no_more_than_eight_bits():
    context = MODEL.max_position
    assert automatic(room(needed("bf16", context=context)))[0] == "bf16"
    assert automatic(room(needed("q8_0", context=context)))[0] == "q8_0"
    chosen, why = automatic(room(needed("q4_0", context=context)))
    assert chosen == "q8_0"
    assert "--max-model-len 131072 would take q4_0" in why


@pytest.mark.parametrize("options", [{"num_tokens": CONTEXT}, {"num_pages": CONTEXT // 16}])
def test_a_named_size_is_what_must_fit(options):
    chosen, why = automatic(room(needed("q6_0"), **options))
    assert chosen == "q6_0" and "32,768 tokens" in why


def test_weights_count_before_they_are_loaded():
    found = room(needed("bf16") + 10**9, max_model_len=CONTEXT)
    weights = replace(found.budget, free_after_bytes=found.budget.free_before_bytes - 10**9 - 1)
    assert automatic(found)[0] == "bf16"
    assert automatic(replace(found, budget=weights))[0] == "q8_0"


def test_weights_of_half_precision_get_their_own_sixteen_bits():
    found = replace(room(10**12), dtype=torch.float16)
    assert automatic(found)[0] == "fp16"


def test_codecs_that_do_not_store_the_models_rows_are_passed_over():
    least = needed("q4_0", NARROW) - 1
    chosen, why = automatic(room(least, NARROW, max_model_len=CONTEXT))
    assert chosen == "q4_0" and "fit in no format" in why  # 64 values: iso has no block of them


def test_formats_that_are_known_to_ruin_a_model_are_passed_over():
    gemma = replace(MODEL, model_type="gemma3_text")
    small = room(needed("iso3"), gemma, max_model_len=CONTEXT)
    chosen, why = automatic(small)
    assert chosen == "q4_0"
    assert "fit in no format that this model bears, as far as is known; q4_0, the smallest," in why
    with pytest.raises(ConfigError, match="it fits in no format that this model bears"):
        checked(small, "q4_0")


def checked(found: Any, name: str) -> None:
    check_context(found, choose_cache(name, found.shape, found.options, CPU, DTYPE))


def test_an_asked_context_that_cannot_fit_is_refused_with_what_would_do():
    found = room(needed("q6_0"), max_model_len=CONTEXT)
    checked(found, "q6_0")
    with pytest.raises(ConfigError) as refused:
        checked(found, "q8_0")
    text = str(refused.value)
    assert text.startswith("max_model_len 32,768 does not fit in a cache of q8_0: at most ")
    assert "it fits in q6_0, k=q6_0,v=q4_0, q4_0, iso4, iso3; or lower max_model_len" in text
    with pytest.raises(ConfigError, match=r"no request does\. .* it fits in no format"):
        checked(room(10**6, max_model_len=CONTEXT), "q8_0")


def test_a_context_beyond_a_named_cache_is_refused():
    found = room(10**12, max_model_len=CONTEXT, num_tokens=CONTEXT - 16)
    with pytest.raises(ConfigError, match="max_model_len 32,768 is more than the 32,752 tokens"):
        checked(found, "q8_0")


def test_the_models_own_context_is_cut_and_not_refused():
    checked(room(needed("q8_0")), "q8_0")


def test_states_of_linear_attention_layers_are_set_aside_and_spoken_of():
    hybrid = geometry({"model_type": "qwen3_5_text"})
    options = ServeOptions("m", max_running_requests=5)
    source = ModelSource(Path("nowhere"), "directory", "m")
    found = room_for(source, hybrid, options, CPU, DTYPE)
    assert found.budget.other_pools_bytes == (5 + 5) * hybrid.state.request_bytes()
    for count, running, total in ((None, 1, 1 + 4), (None, 30, 60), (0, 5, 5), (7, 5, 12)):
        changed = replace(options, state_snapshots=count, max_running_requests=running)
        found = room_for(source, hybrid, changed, CPU, DTYPE)
        assert found.budget.other_pools_bytes == total * hybrid.state.request_bytes()
    alone = replace(options, cache_type="none")
    found = room_for(source, hybrid, alone, CPU, DTYPE)
    assert found.budget.other_pools_bytes == 5 * hybrid.state.request_bytes()
    assert room_for(source, MODEL, options, CPU, DTYPE).budget.other_pools_bytes == 0
    (note,) = state_notes(hybrid, replace(options, state_snapshots=0))
    assert "requests that begin alike are computed whole" in note
    assert state_notes(hybrid, options) == state_notes(hybrid, alone) == ()
    assert state_notes(MODEL, options) == ()
    (note,) = state_notes(MODEL, replace(options, state_snapshots=3))
    assert "no linear-attention layers" in note


def measured(**kl: float) -> Evidence:
    """Formats of the model with their bytes and a mean KL."""
    sizes = {
        name: choose_cache(name, MODEL, ServeOptions("m"), CPU, DTYPE).plan.token_bytes
        for name in ("fp32", *kl)
    }
    return Evidence(
        "a text",
        tuple(Measured(name, size, kl.get(name, 0.0), 0.9) for name, size in sizes.items()),
    )


PAIR = "k=q8_0,v=q4_0"
KNOWN = {
    "bf16": 1e-4,
    "q8_0": 5e-4,
    "q6_0": 0.06,
    PAIR: 0.03,
    "nvfp4": 0.04,
    "q4_0": 0.2,
    "iso4": 3,
}


def test_of_measured_formats_the_nearest_that_fits_is_taken():
    evidence = measured(**KNOWN)
    assert [row.format for row in evidence.ladder] == ["q8_0", PAIR, "nvfp4", "q4_0"]

    def taken(name: str) -> str:
        found = replace(room(needed(name), max_model_len=CONTEXT), evidence=evidence)
        return automatic(found)[0]

    assert [taken(name) for name in ("bf16", "q8_0", "q6_0", "nvfp4", "q4_0", "iso4")] == [
        "bf16", "q8_0", PAIR, "nvfp4", "q4_0", "q4_0",
    ]  # fmt: skip


def test_what_was_measured_is_said():
    found = replace(room(needed(PAIR), max_model_len=CONTEXT), evidence=measured(**KNOWN))
    small = replace(room(needed("q4_0") - 1, max_model_len=CONTEXT), evidence=measured(**KNOWN))
    assert "fit in no format that this model bears" in automatic(small)[1]
    assert "the nearest to fp32 of the measured formats in which they do" in automatic(found)[1]
    assert automatic(found)[1].endswith(
        "measured on a text: mean KL 0.03, 90.0% of the fp32 cache's next tokens"
    )


@pytest.mark.parametrize(
    ("kl", "taken"),
    [
        ({"q8_0": 5e-4, "q6_0": 0.009, "q4_0": 0.2}, "q6_0"),
        ({"q8_0": 5e-4, "q6_0": 0.02, "q4_0": 0.2}, "q8_0"),
        ({"q8_0": 0.3, "q4_0": 0.4}, "bf16"),
        ({"q4_0": 0.2}, "q8_0"),
    ],
)
def test_a_context_that_nobody_asked_for_costs_no_more_than_is_harmless(kl, taken):
    found = replace(room(needed("iso3", context=MODEL.max_position)), evidence=measured(**kl))
    assert automatic(found)[0] == taken


def taken(name: str, evidence: Evidence | None, **options: Any) -> tuple[str, str]:
    """What is taken, and why, where the asked context just fits in a format."""
    wanted = {"max_model_len": CONTEXT} | options
    return automatic(replace(room(needed(name), **wanted), evidence=evidence))


@pytest.mark.parametrize("name", LADDER)
@pytest.mark.parametrize("kl", [{}, {"q8_0": 5e-4}, {"q4_0": 0.17}, {"nvfp4": 0.09}])
def test_a_format_that_was_not_measured_stays_on_the_ladder(name, kl):
    """Whoever tried one format is served no worse than who tried none."""
    chosen, why = taken(name, measured(**kl))
    assert chosen == name
    if name in kl:
        assert "the nearest to fp32 of the measured formats in which they do" in why
        assert "measured on a text: mean KL" in why
    else:
        assert "expected to be the most exact format in which they do; it was not measured" in why
        assert "mean KL" not in why


def test_of_as_many_bytes_the_measured_one_is_taken_unless_it_harms():
    assert taken("q6_0", measured(**{PAIR: 0.03}))[0] == PAIR
    assert taken("q6_0", measured(**{PAIR: 0.3}))[0] == "q6_0"
    assert taken("q6_0", measured(**{"k=q4_0,v=q8_0": 0.16}))[0] == "q6_0"


def test_no_unmeasured_format_is_thought_better_than_a_finer_one_that_was_measured():
    evidence = measured(q8_0=0.3, nvfp4=0.04)
    assert taken("q8_0", evidence)[0] == taken("q6_0", evidence)[0] == "nvfp4"
    # that keys do not bear a rotation says nothing of a format without
    assert taken("q6_0", measured(**{"k=iso4,v=q8_0": 0.8}))[0] == "q6_0"


@pytest.mark.parametrize("name", ["iso4", "iso3"])
def test_what_ruins_is_not_taken_nor_what_must_be_expected_to(name):
    chosen, why = taken(name, measured(iso4=1.4))
    assert chosen == "q4_0"
    assert "fit in no format that this model bears, as far as is known; q4_0, the smallest" in why
    with pytest.raises(ConfigError, match="it fits in no format that this model bears"):
        found = replace(room(needed(name), max_model_len=CONTEXT), evidence=measured(iso4=1.4))
        checked(found, "q4_0")


@pytest.mark.parametrize("kl", [{}, {"bf16": 2.0}])
@pytest.mark.parametrize("max_model_len", [None, CONTEXT])
def test_where_all_that_was_measured_ruins_sixteen_bits_are_taken_and_the_words_agree(
    max_model_len, kl
):
    evidence = measured(q8_0=2.0, q4_0=2.0, **kl)
    chosen, why = taken("q6_0", evidence, max_model_len=max_model_len)
    assert chosen == "bf16"
    assert "nor in bf16" not in why and "would take" not in why


def test_what_a_longer_context_would_cost_is_said():
    context = MODEL.max_position
    found = replace(room(needed("q4_0", context=context)), evidence=measured(q4_0=0.17))
    chosen, why = automatic(found)
    assert chosen == "q8_0"
    assert "--max-model-len 131072 would take q4_0 (mean KL 0.17, 90.0%" in why
    found = replace(found, evidence=measured(q8_0=5e-4))
    assert "would take q4_0 (not measured)" in automatic(found)[1]
    _, why = automatic(replace(found, evidence=measured(q8_0=0.02)))
    assert "do not fit in bf16; bf16 is taken" in why
    assert "no smaller format is known to be harmless to this model" in why
