"""Frequencies of rotary embeddings do not depend on which requests share a step."""

from __future__ import annotations

import pytest
from tiny_families import tiny
from tiny_models import generate, greedy, make_engine, random_prompt, run, tokens_of

from kvq_cli.config import geometry, rotary_notes
from kvq_cli.models import rotary

pytestmark = pytest.mark.usefixtures("one_thread")

SHORT, LONG = 32, 128
LONGROPE = {
    "max_position_embeddings": LONG,
    "original_max_position_embeddings": SHORT,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0 + 2 * i for i in range(8)],
        "original_max_position_embeddings": SHORT,
        "factor": LONG / SHORT,
    },
}
NEW_TOKENS = 8


def longrope():
    return tiny("phi3", **LONGROPE)


def answers(context, lengths):
    engine = make_engine(longrope(), max_model_len=context, max_prefill_tokens=7)
    requests = {str(n): (random_prompt(n), greedy(NEW_TOKENS)) for n in lengths}
    return {int(n): tokens_of(deltas) for n, deltas in run(engine, requests).items()}


def wanted(lengths):
    model = longrope()
    return {n: generate(model, random_prompt(n), NEW_TOKENS) for n in lengths}


def test_short_requests_are_transformers_own_where_all_are_short():
    lengths = (5, 16, SHORT - NEW_TOKENS)
    assert answers(SHORT, lengths) == wanted(lengths)


def test_long_requests_are_transformers_own_in_chunks_that_begin_short():
    lengths = (SHORT + 1, 60, 100)
    assert answers(LONG, lengths) == wanted(lengths)


def test_a_short_request_gets_the_same_tokens_beside_a_long_one():
    alone = answers(LONG, (16,))
    assert answers(LONG, (16, 100))[16] == alone[16]
    # the frequencies matter: transformers gives a short request others
    assert alone != answers(SHORT, (16,)) == wanted((16,))


def test_frequencies_of_some_layers_alone_are_settled_too():
    model = tiny("gemma3", **LONGROPE | {"rope_parameters": {
        "full_attention": {**LONGROPE["rope_parameters"], "long_factor": [3.0] * 16,
                           "short_factor": [1.0] * 16},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }})  # fmt: skip
    module = model.model.rotary_emb
    sliding, full = (
        module.sliding_attention_inv_freq.clone(),
        module.full_attention_inv_freq.clone(),
    )
    rotary.settle(model, LONG)
    assert (module.full_attention_inv_freq * 3).allclose(full)
    assert module.sliding_attention_inv_freq.equal(sliding)
    assert set(module.rope_type.values()) == {"default"}


def test_a_dynamic_models_steps_do_not_ask_the_host_which_frequencies_to_take():
    """No graph could be captured of one that does; no request is long enough for others."""
    scaling = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = tiny("llama", max_position_embeddings=LONG, rope_parameters=scaling)
    want = {n: generate(model, random_prompt(n), NEW_TOKENS) for n in (9, 100)}
    frequencies = model.model.rotary_emb.inv_freq.clone()
    engine = make_engine(model, max_prefill_tokens=7)
    assert model.model.rotary_emb.rope_type == "default"
    assert model.model.rotary_emb.inv_freq.equal(frequencies)
    got = run(engine, {str(n): (random_prompt(n), greedy(NEW_TOKENS)) for n in want})
    assert {int(n): tokens_of(deltas) for n, deltas in got.items()} == want


def test_frequencies_that_never_change_stay():
    model = tiny("llama")
    before = model.model.rotary_emb.inv_freq.clone()
    rotary.settle(model, 1024)
    assert model.model.rotary_emb.inv_freq.equal(before)


@pytest.mark.parametrize(
    "config",
    [
        LONGROPE,
        LONGROPE | {"rope_parameters": {"rope_type": "longrope"}},
        {"max_position_embeddings": LONG,
         "rope_scaling": {"type": "su", "original_max_position_embeddings": SHORT}},
    ],
)  # fmt: skip
def test_the_user_is_told_which_frequencies_requests_get(config):
    model = geometry({"model_type": "phi3", **config})
    assert model.short_positions == SHORT
    (note,) = rotary_notes(model, LONG)
    assert "requests may have 128 tokens" in note and "--max-model-len 32" in note
    (note,) = rotary_notes(model, SHORT)
    assert "all get the short ones" in note


def test_a_model_without_them_is_silent():
    model = geometry({"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert model.short_positions is None and rotary_notes(model, 4096) == ()
