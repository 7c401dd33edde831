"""The engine over a backend for each op; on a CPU Triton's interpreter runs the kernels."""

import pytest
import torch
from tiny_models import gemma, greedy, llama, make_engine, random_prompt, record_logits, run

from kvq_attention import launches
from kvq_attention.support import Choice

MIXED = Choice(store="triton", decode="triton", extend="reference")
TRITON = Choice("triton", "triton", "triton")
REFERENCE = Choice("reference", "reference", "reference")
NEW = 3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# A page is crossed while decoding, and a prompt takes several chunks.
PROMPTS = {"edge": random_prompt(15), "long": random_prompt(26)}


def serve(model, backends, cache):
    """Tokens of each request, and what was launched."""
    engine = make_engine(
        model, cache=cache, page_tokens=16, num_pages=16, max_prefill_tokens=16, backends=backends
    )
    logits = record_logits(engine)
    with launches.counting() as launched:
        deltas = run(engine, {name: (prompt, greedy(NEW)) for name, prompt in PROMPTS.items()})
    calls = {"triton: loop": n} if (n := launched["triton"]["extend"]) else {}
    assert engine.stats().extend_routes == calls
    tokens = {name: [t for d in given for t in d.token_ids] for name, given in deltas.items()}
    return tokens, launched, logits


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("make", "cache"), [(llama, "k=q8_0,v=q4_0"), (gemma, "fp32")])
def test_triton_computes_what_the_reference_does(make, cache, device):
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off where there is a GPU")
    model = make(head_dim=64).to(device)
    want, by_reference, _ = serve(model, REFERENCE, cache)
    calls = by_reference["reference"]
    assert min(calls["store"], calls["decode"], calls["extend"]) > 0
    for backends in (MIXED, TRITON):
        got, launched, logits = serve(model, backends, cache)
        assert got == want
        assert all(bool(step.isfinite().all()) for step in logits)
        # the same calls, on the backends that were asked for
        asked = backends.by_op()
        for name in ("triton", "reference"):
            wanted = {op: n if asked.get(op) == name else 0 for op, n in calls.items()}
            assert launched[name] == wanted


def test_p066_a_rebuild_that_changes_the_backend_says_so():
    engine = make_engine(llama(head_dim=64), page_tokens=16, backends=MIXED)
    report = engine.rebuild(cache_dtype="q8_0")  # chosen anew, on this CPU
    assert report.before.attention == MIXED.by_op()
    assert report.after.attention == engine.runner.backends.by_op() == REFERENCE.by_op()
