"""Cache formats: what is understood, what is refused and why."""

from __future__ import annotations

import pytest
from geometries import shape

import kvq_codecs
from kvq_cli.config import (
    CacheFormat,
    CacheFormatError,
    ConfigError,
    check_format,
    parse_cache_dtype,
    quality_notes,
)


@pytest.mark.parametrize(
    ("text", "k", "v"),
    [
        ("q4_0", "q4_0", "q4_0"),
        ("k=q8_0,v=q4_0", "q8_0", "q4_0"),
        (" v = fp32 , k = bf16 ", "bf16", "fp32"),
    ],
)
def test_cache_dtypes_that_are_understood(text, k, v):
    assert parse_cache_dtype(text) == CacheFormat(k, v)


@pytest.mark.parametrize("name", kvq_codecs.names())
def test_every_codec_is_a_cache_dtype_and_prints_as_one(name):
    assert parse_cache_dtype(str(parse_cache_dtype(name))) == CacheFormat(name, name)
    mixed = f"k={name},v=fp32"
    assert parse_cache_dtype(str(parse_cache_dtype(mixed))) == CacheFormat(name, "fp32")


@pytest.mark.parametrize(
    "text",
    ["", "q5_9", "k=q8_0", "k=q8_0,v=", "k=q8_0,k=q4_0", "q8_0,q4_0", "k=q8_0,v=q4_0,w=q4_0",
     "k=q8_0,q4_0", "Q4_0", "=q4_0,v=q4_0"],
)  # fmt: skip
def test_cache_dtypes_that_are_refused_name_the_given_and_the_allowed(text):
    with pytest.raises(CacheFormatError) as refused:
        parse_cache_dtype(text)
    assert repr(text) in str(refused.value)
    assert all(name in str(refused.value) for name in kvq_codecs.names())


def test_a_codec_wider_than_the_head_is_refused_with_those_that_fit():
    with pytest.raises(CacheFormatError) as refused:
        check_format(shape(head_dim=64), CacheFormat("q8_0", "iso3"))
    text = str(refused.value)
    assert text.startswith("iso3 cannot store the values of this llama model")
    assert "128 values at a time and head_dim 64 is not a multiple" in text
    fitting = text.rsplit(": ", 1)[1].split(", ")
    assert fitting == [n for n in kvq_codecs.names() if not 64 % kvq_codecs.get(n).spec.divisor]
    assert "q8_0" in fitting and "iso4" not in fitting


@pytest.mark.parametrize("name", kvq_codecs.names())
@pytest.mark.parametrize("head_dim", [16, 48, 64, 96, 128, 256])
def test_a_format_is_accepted_exactly_when_its_codec_stores_such_rows(name, head_dim):
    try:
        kvq_codecs.get(name).spec.check(head_dim)
    except ValueError:
        with pytest.raises(ConfigError):
            check_format(shape(head_dim=head_dim), CacheFormat(name, "fp32"))
    else:
        check_format(shape(head_dim=head_dim), CacheFormat(name, "fp32"))


def test_iso_on_gemma3_is_warned_of_and_nothing_else_is():
    gemma = shape(model_type="gemma3_text", head_dim=256)
    (note,) = quality_notes(gemma, CacheFormat("iso3", "q8_0"))
    assert "iso3 is known to ruin Gemma 3" in note and "mean KL of 2.1" in note
    assert all(safer in note for safer in ("q8_0", "q6_0", "k=q8_0,v=q4_0"))
    assert len(quality_notes(gemma, CacheFormat("iso3", "iso4"))) == 2
    assert quality_notes(gemma, CacheFormat("q8_0", "q4_0")) == ()
    assert quality_notes(shape(head_dim=128), CacheFormat("iso3", "iso3")) == ()
