"""What a budget holds, against pools that are counted out one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from geometries import shape
from published import CONFIGS

from kvq_cli.capacity import BASELINE, MIXES, Planner
from kvq_cli.config import CacheFormat, ConfigError, geometry
from kvq_cli.sizing import Limits
from kvq_pools import CacheSpace, Pool, first_visible

Q4 = CacheFormat("q4_0", "q4_0")


def planner_of(model, budget_bytes, lengths=(100,), **changes) -> Planner:
    limits = Limits(model.max_position, 16, 3, 32, on_host=True, state_snapshots=2)
    return Planner(model, budget_bytes, replace(limits, **changes), lengths)


MODELS = {
    "full": shape(max_position=500),
    "half": shape(num_layers=4, max_position=500, windows=(None, 24) * 2),
    "sliding": shape(max_position=500, windows=(24, 24)),
    "states": geometry(
        {"model_type": "qwen3_5_text", "num_hidden_layers": 4, "hidden_size": 64,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 64,
         "intermediate_size": 64, "max_position_embeddings": 500, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("budget_bytes", [3_000_000, 8_000_000, 25_000_000])
def test_so_many_requests_fit_and_one_more_does_not(name, budget_bytes):
    """Each with its pages, its window, its state and its row of logits; from real pools."""
    model = MODELS[name]
    planner = planner_of(model, budget_bytes, (100, 450))
    for length, count in planner.capacity(Q4).requests.items():
        for requests, fits in ((count, True), (count + 1, False)):
            if not requests:
                continue
            limits = replace(planner.limits, max_running_requests=requests)
            pages = requests * limits.request_pages(model, length)
            pool = Pool(planner.plan(Q4, requests), pages)
            states = (requests + 2) * model.state.request_bytes() if model.state else 0
            assert (pool.nbytes + states + limits.needs(model, length) <= budget_bytes) == fits


@pytest.mark.parametrize("name", MODELS)
def test_the_counted_requests_really_run_in_the_pages_they_are_given(name):
    """Each computes its tokens in steps of the prefill's size, all of them at once."""
    planner = planner_of(MODELS[name], 12_000_000, (100, 450))
    for length, count in planner.capacity(Q4).requests.items():
        requests = min(count, 12)
        plan = planner.plan(Q4, requests)
        space = CacheSpace(plan, requests * planner.limits.request_pages(planner.model, length))
        running = [space.open() for _ in range(requests)]
        for done in range(0, length, 32):
            for sequence in running:
                sequence.grow(min(done + 32, length))
                sequence.advance(min(done + 32, length))
        space.check_integrity()


def test_p024_waste_is_that_of_the_slots_nobody_reads():
    """A capacity kind: pages made large to please another layer group, mostly empty."""
    model = MODELS["half"]
    for page_tokens in (1, 16, 64):
        planner = planner_of(model, 10**9, (24, 30, 100, 129), page_tokens=page_tokens)
        tiers = {tier.tier: tier for tier in planner.pages()}
        assert {tier.page_tokens for tier in tiers.values()} == {page_tokens}
        for length in planner.lengths:
            for tier, first in (("full", 0), ("window", first_visible(length, 24))):
                read = range(first, length)
                slots = {position // page_tokens for position in read}
                waste = 1 - len(read) / (len(slots) * page_tokens)
                assert tiers[tier].waste[length] == pytest.approx(waste)


def test_p024_quantizing_does_not_inflate_pages():
    planner = planner_of(geometry(CONFIGS["qwen3.5-35b-a3b"]), 2**35)
    sizes = [planner.capacity(f).page_bytes_by_tier["full"] for f in (BASELINE, Q4)]
    assert sizes == [16 * 20480, 16 * 5760]
    assert {tier.page_tokens for tier in planner.pages()} == {16}


def test_every_codec_that_fits_and_the_mixes_are_planned():
    narrow = [str(f) for f in planner_of(shape(head_dim=64), 10**9).formats()]
    assert "q4_0" in narrow and "k=q8_0,v=q4_0" in narrow and "iso4" not in narrow
    wide = planner_of(shape(head_dim=128), 10**9).formats()
    assert set(MIXES) <= set(wide) and CacheFormat("iso4", "iso4") in wide
    latent = planner_of(geometry(CONFIGS["deepseek-v3"]), 10**11).formats()
    assert all(cache.k == cache.v for cache in latent) and len(latent) > 5


def test_what_binds_is_said():
    model = MODELS["full"]
    roomy, tight = planner_of(model, 10**9).capacity(Q4), planner_of(model, 2_000_000).capacity(Q4)
    assert (roomy.limit, roomy.context) == ("positions", 500)
    assert tight.limit == "memory" and 0 < tight.context < 500
    assert planner_of(model, 10**9, (500, 501)).capacity(Q4).requests[501] is None


def test_a_format_that_does_not_fit_holds_nothing_and_none_at_all_is_an_error():
    model = replace(MODELS["full"], num_layers=200, windows=(None,) * 200)
    planner = planner_of(model, 5_000_000)
    fp32, q4 = planner.capacities([CacheFormat("fp32", "fp32"), Q4])
    assert (fp32.tokens, fp32.context, fp32.limit) == (0, 0, "memory") and q4.tokens > 0
    with pytest.raises(ConfigError, match=r"1,000 bytes holds no cache .* of q4_0, takes [\d,]+"):
        planner_of(model, 1000).capacities([BASELINE, Q4])
