"""Cache formats: what is understood, what is refused and why."""

from __future__ import annotations

import re

import pytest
from geometries import shape

import kvq_codecs
from kvq_cli.config import (
    CacheFormat,
    CacheFormatError,
    ConfigError,
    ModelGeometry,
    check_format,
    geometry,
    parse_cache_dtype,
    parse_formats,
    parse_layer_dtypes,
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
        parse_formats(text, shape())
    assert repr(text) in str(refused.value)
    assert all(name in str(refused.value) for name in kvq_codecs.names())
    assert "LAYERS:FORMAT" in str(refused.value)
    with pytest.raises(CacheFormatError, match="it is no format; give one codec") as for_all:
        parse_cache_dtype(text)
    assert "LAYERS" not in str(for_all.value)


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
    assert "iso3 is known to ruin Gemma 3" in note and "mean KL of 2.2" in note
    assert all(safer in note for safer in ("q8_0", "q6_0", "k=q8_0,v=q4_0"))
    assert len(quality_notes(gemma, CacheFormat("iso3", "iso4"))) == 2
    assert quality_notes(gemma, CacheFormat("q8_0", "q4_0")) == ()
    assert quality_notes(shape(head_dim=128), CacheFormat("iso3", "iso3")) == ()


def hybrid() -> ModelGeometry:
    """Eight layers of which 3 and 7 have a cache."""
    return geometry({"model_type": "qwen3_next", "num_hidden_layers": 8})


Q4, BF16, MIX = (
    CacheFormat("q4_0", "q4_0"),
    CacheFormat("bf16", "bf16"),
    CacheFormat("q8_0", "q4_0"),
)


@pytest.mark.parametrize(
    ("text", "by_layer"),
    [
        ("0-1:bf16,2-:q4_0", [BF16, BF16, Q4, Q4]),
        ("2-:q4_0,0-1:bf16", [BF16, BF16, Q4, Q4]),
        ("0:k=q8_0,v=q4_0,1-2:bf16,3:k=q8_0,v=q4_0", [MIX, BF16, BF16, MIX]),
        (" 0 - 2 : v=q4_0 , k=q8_0 , 3 : bf16 ", [MIX, MIX, MIX, BF16]),
    ],
)
def test_formats_by_layer_that_are_understood(text, by_layer):
    model = shape(num_layers=4, windows=(None,) * 4)
    found = parse_layer_dtypes(text, model)
    assert found.layers == dict(enumerate(by_layer))
    assert parse_layer_dtypes(str(found), model) == found
    assert parse_formats(text, model) == found


@pytest.mark.parametrize("text", ["0-:q4_0", "0:q4_0,1:q4_0,2:q4_0,3:q4_0", "0-3:k=q4_0,v=q4_0"])
def test_layers_of_one_format_have_its_name(text):
    """By which what was measured of it is found."""
    assert str(parse_formats(text, shape(num_layers=4, windows=(None,) * 4))) == "q4_0"
    assert str(parse_formats("3:q4_0,7:q4_0", hybrid())) == "q4_0"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("0-1:bf16,3:q4_0", "layer 2 has no format"),
        ("1-2:bf16", "layers 0, 3 have no format"),
        ("0-2:bf16,2-:q4_0", "layer 2 is named twice"),
        ("0-:bf16,1-2:q4_0", "layers 1-2 are named twice"),
        ("0-4:bf16", "0-4 is not within the model's layers, 0-3"),
        ("4:bf16,0-3:q4_0", "4 is not within the model's layers, 0-3"),
        ("2-1:bf16", "2-1 runs backwards"),
        ("9-1:bf16", "9-1 is not within the model's layers, 0-3"),
        (f"0-{9 * '9'}0:bf16", "is no range of layers"),
        ("0-1:,2-:q4_0", "'0-1:' gives its layers no format"),
        ("-2:bf16", "'-2' is no range of layers"),
        ("x:bf16", "'x' is no range of layers"),
        ("0 1:bf16", "'0 1' is no range of layers"),
        (":bf16", "'' is no range of layers"),
        ("0-:", "give one codec"),
        ("0-:q5_9", "'0-:q5_9': '0-:q5_9' gives its layers no format"),
        ("0-:q4_0,v=q4_0", "give one codec"),
        ("q4_0,0-3:bf16", "'q4_0' names no layers"),
        ("0-1:bf16;2-:q4_0", "give one codec"),
    ],
)
def test_formats_by_layer_that_are_refused_say_why(text, complaint):
    with pytest.raises(CacheFormatError, match=re.escape(complaint)) as refused:
        parse_layer_dtypes(text, shape(num_layers=4, windows=(None,) * 4))
    said = str(refused.value)
    assert said.startswith(f"cache dtype {text!r}: ")
    assert "LAYERS:FORMAT" in said and all(name in said for name in kvq_codecs.names())


def test_a_long_text_is_not_echoed_whole():
    for text in ("x" * 10_000, "0-:" + "x" * 10_000, "y" * 10_000 + ":q4_0"):
        with pytest.raises(CacheFormatError) as refused:
            parse_formats(text, shape())
        assert text[:50] in str(refused.value) and len(str(refused.value)) < 600


def test_ranges_may_run_over_layers_without_a_cache_but_not_name_only_such():
    found = parse_layer_dtypes("0-4:bf16,5-:q4_0", hybrid())
    assert found.layers == {3: BF16, 7: Q4} and str(found) == "3:bf16,7:q4_0"
    assert str(parse_layer_dtypes("0-:q4_0", hybrid())) == "3-7:q4_0"
    with pytest.raises(CacheFormatError, match=r"no layer of 4-6 has a cache .* layers 3, 7 have"):
        parse_layer_dtypes("4-6:bf16,0-3:q4_0,7:q4_0", hybrid())


def test_every_layers_codec_must_store_the_models_rows():
    model = shape(num_layers=4, windows=(None,) * 4)
    with pytest.raises(CacheFormatError, match="iso4 cannot store the values"):
        check_format(model, parse_formats("0-2:q4_0,3:k=q4_0,v=iso4", model))


def test_a_latent_row_takes_one_codec_of_its_width():
    latent = geometry({"model_type": "deepseek_v3"})
    check_format(latent, CacheFormat("nvfp4", "nvfp4"))
    with pytest.raises(CacheFormatError, match=r"k=q8_0,v=q4_0: .* one latent row"):
        check_format(latent, MIX)
    with pytest.raises(CacheFormatError, match=r"iso3 cannot store the latent rows .* width 576"):
        check_format(latent, CacheFormat("iso3", "iso3"))
