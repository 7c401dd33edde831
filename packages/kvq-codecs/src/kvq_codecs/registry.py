"""Every codec by name."""

from __future__ import annotations

from kvq_codecs.codec import Codec
from kvq_codecs.errors import CodecError, UnknownCodecError, check_kind
from kvq_codecs.formats import (
    bf16,
    fp8,
    fp8_e4m3,
    fp16,
    fp32,
    iso3,
    iso4,
    nvfp4,
    q4_0,
    q6_0,
    q8_0,
)

_FORMATS = (fp32, bf16, fp16, q8_0, q6_0, q4_0, fp8_e4m3, fp8, nvfp4, iso3, iso4)

BUILT_IN = tuple(m.SPEC.name for m in _FORMATS)
_CODECS: dict[str, Codec] = {m.SPEC.name: Codec(m.SPEC, m.encode, m.decode) for m in _FORMATS}


def get(name: str) -> Codec:
    """The codec of that name; `UnknownCodecError` lists the known ones."""
    try:
        return _CODECS[name]
    except (KeyError, TypeError):  # a list is no key
        raise UnknownCodecError(
            f"unknown codec {name!r}; known codecs: {', '.join(_CODECS)}"
        ) from None


def names() -> tuple[str, ...]:
    """Registered names, in the order of registration."""
    return tuple(_CODECS)


def register(codec: Codec) -> None:
    """Add a codec under its spec's name, which must be new."""
    check_kind(codec, Codec, "what is registered", CodecError)
    if codec.name in _CODECS:
        raise CodecError(
            f"codec {codec.name!r} is registered already; bytes never change under a name, "
            "so give new ones a new name"
        )
    _CODECS[codec.name] = codec


def unregister(name: str) -> None:
    """Remove a codec that `register` added."""
    get(name)
    if name in BUILT_IN:
        raise CodecError(f"codec {name!r} is built in and cannot be removed")
    del _CODECS[name]
