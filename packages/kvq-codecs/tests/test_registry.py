"""Names."""

from __future__ import annotations

from typing import Any

import pytest

import kvq_codecs
from kvq_codecs import Codec, CodecError, UnknownCodecError

from . import invented


def test_names_stand_in_the_order_of_the_formats() -> None:
    assert " ".join(kvq_codecs.names()) == (
        "fp32 bf16 fp16 q8_0 q6_0 q4_0 fp8_e4m3 fp8 nvfp4 iso3 iso4"
    )


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownCodecError, match=r"'int4'.*q4_0.*iso4"):
        kvq_codecs.get("int4")


def test_a_new_codec_comes_and_goes() -> None:
    kvq_codecs.register(invented.CODEC)
    try:
        assert kvq_codecs.get("invented_5") is invented.CODEC
        assert kvq_codecs.names()[-1] == "invented_5"
        with pytest.raises(CodecError, match="registered already"):
            kvq_codecs.register(invented.CODEC)
    finally:
        kvq_codecs.unregister("invented_5")
    with pytest.raises(UnknownCodecError):
        kvq_codecs.unregister("invented_5")


@pytest.mark.parametrize("name", [[], {}, None, 3, ""])
def test_what_is_no_name_is_unknown(name: Any) -> None:
    for use in (kvq_codecs.get, kvq_codecs.unregister):
        with pytest.raises(UnknownCodecError, match=r"unknown codec .*q4_0"):
            use(name)


@pytest.mark.parametrize("given", [None, invented.SPEC, invented, Codec])
def test_only_codecs_are_registered(given: Any) -> None:
    with pytest.raises(CodecError, match="must be of type Codec"):
        kvq_codecs.register(given)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((None, invented.encode, invented.decode), "spec must be of type Spec, got NoneType"),
        (
            (invented.SPEC, None, invented.decode),
            "invented_5: encode_rows must be of type Callable",
        ),
        ((invented.SPEC, invented.encode, 3), "invented_5: decode_rows must be of type Callable"),
    ],
)
def test_a_codec_of_wrong_parts_is_refused(parts: Any, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        Codec(*parts)


def test_built_in_codecs_stay() -> None:
    with pytest.raises(CodecError, match="built in"):
        kvq_codecs.unregister("fp32")
