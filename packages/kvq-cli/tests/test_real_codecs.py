"""Every codec on both real models, through the pool, the attention and the engine that serve."""

import pytest
from tiny_models import greedy, make_engine, run

import kvq_codecs
from kvq_cli.config import CacheFormatError, check_format, parse_cache_dtype

# Formats whose answers must make sense; the others must run to the end.
COHERENT = ("fp32", "bf16", "fp16", "q8_0", "q6_0", "fp8_e4m3", "fp8", "k=q8_0,v=q4_0")
FORMATS = (*kvq_codecs.names(), "k=q8_0,v=q4_0")
ISO = ("iso3", "iso4")
NEW_TOKENS = 12


def complete(loaded, cache, prompt, chunk):
    engine = make_engine(
        loaded.model,
        cache=cache,
        num_pages=16,
        page_tokens=16,
        max_prefill_tokens=chunk,
        max_running_requests=1,
        tokenizer=loaded.tokenizer,
    )
    deltas = run(engine, {"r": (prompt, greedy(NEW_TOKENS))})["r"]
    assert sum(len(d.token_ids) for d in deltas) == NEW_TOKENS
    return "".join(d.text for d in deltas)


@pytest.mark.parametrize("cache", [f for f in FORMATS if f not in ISO])
def test_smollm2_chats_from_every_codec_that_stores_head_dim_64(smollm2, cache):
    prompt = smollm2.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
    )["input_ids"]
    # in one chunk, as `kvq serve` reads it: the first word is nearly a tie in this small model
    text = complete(smollm2, cache, prompt, chunk=512)
    if cache in COHERENT:
        assert "The capital of France is Paris" in text


@pytest.mark.parametrize("cache", FORMATS)
def test_gemma_completes_from_every_codec(gemma, cache):
    prompt = gemma.tokenizer("France is a country in Europe. The capital of France is")["input_ids"]
    # in chunks: the prompt's later tokens read its earlier ones packed
    text = complete(gemma, cache, prompt, chunk=4)
    if cache in COHERENT:
        assert text.startswith(" Paris")


@pytest.mark.parametrize("cache", ISO)
def test_iso_on_smollm2_is_refused_with_reason_and_alternatives(smollm2, cache):
    with pytest.raises(CacheFormatError) as caught:
        check_format(smollm2.geometry, parse_cache_dtype(cache))
    said = str(caught.value)
    assert cache in said
    assert "128" in said
    assert "64" in said
    assert all(name in said for name in kvq_codecs.names() if name not in ISO)
