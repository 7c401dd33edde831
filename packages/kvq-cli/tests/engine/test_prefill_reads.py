"""What a prompt's tokens see of their own step, and what follows for where a prompt is cut."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tiny_models import gemma, greedy, llama, make_engine, random_prompt, record_logits, run

from kvq_attention import UnsupportedError, launches, ops, support
from kvq_cli.config import ConfigError
from kvq_cli.serve_options import ServeOptions

PROMPT = random_prompt(50)
ANSWER = 6
CUTS = [1, 7, 16, 17, len(PROMPT)]


@pytest.fixture
def row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers give a token the bits that it gets alone; torch's depend on how many there are.

    What is left to depend on the cut is attention and the cache.
    """
    linear = torch.nn.functional.linear

    def of_each(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows = [linear(row.clone()[None], *rest) for row in x.reshape(-1, x.shape[-1])]
        return torch.cat(rows).reshape(*x.shape[:-1], -1)

    monkeypatch.setattr(torch.nn.functional, "linear", of_each)


def served(make: Any, cut: int, **options: Any) -> tuple[list[int], list[torch.Tensor]]:
    """The answer, and the logits that it was drawn from."""
    options = {"page_tokens": 16, "num_pages": 16, **options}
    engine = make_engine(make(head_dim=128), max_prefill_tokens=cut, **options)
    logits = record_logits(engine)
    deltas = run(engine, {"r": (PROMPT, greedy(ANSWER))})["r"]
    return [t for delta in deltas for t in delta.token_ids], logits[-ANSWER:]


@pytest.mark.parametrize(
    ("make", "cache"),
    [(llama, "q4_0"), (gemma, "q4_0"), (gemma, "k=q8_0,v=nvfp4")],
)
def test_packed_reads_give_the_same_bits_wherever_a_prompt_is_cut(
    row_by_row: None, make: Any, cache: str
) -> None:
    tokens, logits = served(make, CUTS[-1], cache=cache, prefill_reads="packed")
    for cut in CUTS[:-1]:
        other, seen = served(make, cut, cache=cache, prefill_reads="packed")
        assert other == tokens
        assert all(torch.equal(a, b) for a, b in zip(seen, logits, strict=True)), cut


def test_own_reads_depend_on_the_cut(row_by_row: None) -> None:
    """So that the test above says something."""
    _, whole = served(llama, CUTS[-1], cache="q4_0")
    _, cut = served(llama, 7, cache="q4_0")
    _, packed = served(llama, 7, cache="q4_0", prefill_reads="packed")
    assert not torch.equal(whole[0], cut[0])
    assert not torch.equal(cut[0], packed[0])


@pytest.mark.parametrize("reads", ["own", "packed"])
@pytest.mark.parametrize("make", [llama, gemma])
def test_a_lossless_cache_is_the_same_either_way(make: Any, reads: str) -> None:
    tokens, _ = served(make, 50, cache="fp32")
    assert served(make, 16, cache="fp32", prefill_reads=reads)[0] == tokens


@pytest.mark.parametrize("cut", [12, 13])
def test_packed_reads_make_a_prefix_hit_a_cold_run(row_by_row: None, cut: int) -> None:
    model = llama(head_dim=128)
    options: dict[str, Any] = {"cache": "q4_0", "prefill_reads": "packed"}
    cold = make_engine(model, max_prefill_tokens=64, cache_type="none", **options)
    want = record_logits(cold)
    run(cold, {"r": (PROMPT, greedy(ANSWER))})
    warm = make_engine(model, max_prefill_tokens=64, **options)
    run(warm, {"r": (PROMPT[:cut], greedy(1))})
    got = record_logits(warm)
    (first, *_) = run(warm, {"r": (PROMPT, greedy(ANSWER))})["r"]
    assert first.cached_tokens == cut
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_packed_prefill_stores_first_and_then_decodes_by_the_backend_of_extends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []
    cuts: list[bool] = []

    def noted(name: str, op: Any, *args: Any, **given: Any) -> Any:
        called.append(f"{name} {given['backend']}")
        if name == "decode":
            cuts.append(args[3].any_cut)
        return op(*args, **given)

    for name in ("store", "decode", "extend"):
        monkeypatch.setattr(ops, name, partial(noted, name, getattr(ops, name)))
    backends = support.Choice(store="reference", decode="elsewhere", extend="reference")
    engine = make_engine(llama(), prefill_reads="packed", backends=backends)
    with launches.counting() as counted:
        run(engine, {"r": (PROMPT[:9], greedy(1))})
    assert called == ["store reference", "decode reference"] * 2  # of two layers
    assert counted["reference"]["extend"] == 0
    assert cuts == [True] * 2, "no cut may change a bit"
    called.clear()
    cuts.clear()
    run(make_engine(llama()), {"r": (PROMPT[:9], greedy(2))})
    assert called[:4] == ["extend reference", "store reference"] * 2
    assert called[4:] == ["store reference", "decode reference"] * 2
    assert cuts == [False] * 2, "decodes are cut as is fastest"


def test_what_does_not_decode_cannot_read_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An extend of triton's and a decode of the reference's are a choice, and no packed prefill."""
    without = [row for row in support.SUPPORT if (row.backend, row.op) != ("triton", "decode")]
    monkeypatch.setattr(support, "SUPPORT", tuple(without))
    options: dict[str, Any] = {"page_tokens": 16, "attention_backend": "extend=triton"}
    engine = make_engine(llama(head_dim=64), **options)
    assert engine.runner.backends.extend == "triton"
    with pytest.raises(UnsupportedError, match="triton lacks decode"):
        make_engine(llama(head_dim=64), prefill_reads="packed", **options)


def test_the_scratch_of_extends_is_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, extend = set(), ops.extend

    def noted(*args: Any, **given: Any) -> Any:
        seen.add(given["scratch_bytes"])
        return extend(*args, **given)

    monkeypatch.setattr(ops, "extend", noted)
    assert ServeOptions("demo").scratch_bytes == ops.SCRATCH_BYTES
    for mebibytes in (128, 3, 0):
        seen.clear()
        engine = make_engine(llama(), prefill_scratch_mb=mebibytes)
        run(engine, {"r": (PROMPT, greedy(1))})
        assert seen == {mebibytes << 20}
    with pytest.raises(ConfigError, match="prefill_scratch_mb must be at least 0, got -1"):
        ServeOptions("demo", prefill_scratch_mb=-1)


def test_other_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="prefill_reads must be own or packed, got 'fresh'"):
        ServeOptions("demo", prefill_reads="fresh")
