import pytest

import kvq_codecs
from kvq_attention.bench.cases import (
    Case,
    Formats,
    Shape,
    parse_cases,
    parse_counts,
    parse_formats,
    parse_shape,
)
from kvq_attention.errors import AttentionError


@pytest.mark.parametrize(
    ("text", "case"),
    [("8x32k", Case(8, 32768)), ("1x128k", Case(1, 131072)), ("2×100", Case(2, 100))],
)
def test_a_case_is_named_as_it_is_written(text, case):
    assert parse_cases(text) == (case,)
    assert parse_cases(case.name) == (case,)


def test_lists_keep_their_order_and_drop_what_is_said_twice():
    assert parse_cases("4x1k, 1x64,4x1024") == (Case(4, 1024), Case(1, 64))
    assert parse_counts("64,16,64", "pages") == (64, 16)


def test_formats_split_at_commas_but_not_inside_a_pair():
    found = parse_formats("q4_0,k=q8_0,v=q4_0,bf16,k=fp8,v=fp8")
    pair = Formats("q8_0", "q4_0")
    assert found == (Formats("q4_0", "q4_0"), pair, Formats("bf16", "bf16"), Formats("fp8", "fp8"))
    assert parse_formats(pair.name) == (pair,)


def test_a_token_costs_what_its_rows_do():
    shape = parse_shape("32/8x128")
    assert shape == Shape(32, 8, 128) == parse_shape(shape.name)
    assert Formats("bf16", "bf16").token_bytes(shape) == 2 * 8 * 256
    assert Formats("q8_0", "q4_0").token_bytes(shape) == 8 * (136 + 72)


@pytest.mark.parametrize("text", ["8x", "0x4k", "8x32K", "x", "8*4", "", " , "])
def test_a_case_that_is_none_is_refused(text):
    with pytest.raises(AttentionError, match="case"):
        parse_cases(text)


@pytest.mark.parametrize("text", ["32x128", "32/5x128", "0/0x64", "32/8"])
def test_a_shape_that_is_none_is_refused(text):
    with pytest.raises(AttentionError, match="HEADS/KV_HEADSxHEAD_DIM"):
        parse_shape(text)


@pytest.mark.parametrize("text", ["16,x", "-1", "0", "1.5"])
def test_a_count_that_is_none_is_refused(text):
    with pytest.raises(AttentionError, match="pages"):
        parse_counts(text, "pages")


def test_an_unknown_codec_is_refused_with_those_there_are():
    with pytest.raises(kvq_codecs.UnknownCodecError, match="known codecs: fp32"):
        parse_formats("q4_0,q5_0")
