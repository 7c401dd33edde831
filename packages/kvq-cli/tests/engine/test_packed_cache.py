"""What the engine computes from packed rows, against transformers over the rows they decode to."""

import inspect

import pytest
import torch
from engine_tolerances import LOGITS_FLOAT64
from tiny_models import gemma, greedy, llama, make_engine
from transformers import DynamicCache

import kvq_codecs
from kvq_cli.config import parse_cache_dtype

PROMPT = [(37 * i) % 90 + 3 for i in range(40)]


def oracle(model, cache, chunk):
    """Last logits when transformers' own cache holds decode(encode(row)) of every earlier chunk."""
    formats = parse_cache_dtype(cache)
    model.set_attn_implementation("sdpa")  # eager would sum in float32
    rows = DynamicCache()  # unbounded in every layer: the mask applies the window
    # transformers 5.24 renames the argument
    takes = inspect.signature(model.forward).parameters
    argument = {"cache" if "cache" in takes else "past_key_values": rows}
    with torch.inference_mode():
        for start in range(0, len(PROMPT), chunk):
            ids = torch.tensor([PROMPT[start : start + chunk]])
            positions = torch.arange(start, start + ids.shape[1])[None]
            out = model(ids, position_ids=positions, use_cache=True, **argument)
            for layer in rows.layers:
                for name, codec in (("keys", formats.k), ("values", formats.v)):
                    whole = getattr(layer, name)
                    new = kvq_codecs.get(codec).encode(whole[:, :, start:])
                    whole[:, :, start:] = kvq_codecs.get(codec).decode(new)
    return out.logits[0, -1]


@pytest.mark.parametrize("make", [llama, gemma])
@pytest.mark.parametrize("chunk", [5, 16])
@pytest.mark.parametrize(
    "cache", [*(n for n in kvq_codecs.names() if not n.startswith("iso")), "k=q8_0,v=q4_0"]
)
def test_logits_are_those_of_attention_over_decoded_rows(make, chunk, cache):
    # float64: two orders of summation differ too little to move a row across a rounding boundary
    model = make().double()
    want = oracle(model, cache, chunk)
    engine = make_engine(model, cache=cache, max_prefill_tokens=chunk)
    seen = []
    forward = engine.runner.forward
    engine.runner.forward = lambda step: seen.append(forward(step)) or seen[-1]
    engine.add("r", PROMPT, greedy(1))
    while engine.has_work:
        engine.step()
    assert (seen[-1][0] - want).abs().max() <= LOGITS_FLOAT64
