"""Names."""

from __future__ import annotations

import pytest

import kvq_codecs
from kvq_codecs import CodecError, UnknownCodecError

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


def test_built_in_codecs_stay() -> None:
    with pytest.raises(CodecError, match="built in"):
        kvq_codecs.unregister("fp32")
