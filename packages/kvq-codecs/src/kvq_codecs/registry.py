"""Every codec by name."""

from __future__ import annotations

from kvq_codecs.codec import Codec
from kvq_codecs.errors import UnknownCodecError
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

BUILT_IN = (fp32, bf16, fp16, q8_0, q6_0, q4_0, fp8_e4m3, fp8, nvfp4, iso3, iso4)

_CODECS: dict[str, Codec] = {m.SPEC.name: Codec(m.SPEC, m.encode, m.decode) for m in BUILT_IN}


def get(name: str) -> Codec:
    """The codec of that name; `UnknownCodecError` lists the known ones."""
    try:
        return _CODECS[name]
    except KeyError:
        raise UnknownCodecError(
            f"unknown codec {name!r}; known codecs: {', '.join(_CODECS)}"
        ) from None


def names() -> tuple[str, ...]:
    """Registered names, in the order of registration."""
    return tuple(_CODECS)


def register(codec: Codec) -> None:
    """Add a codec. Stored bytes never change under a name, so a name is taken once."""
    if codec.name in _CODECS:
        raise ValueError(f"codec {codec.name!r} is registered already")
    _CODECS[codec.name] = codec


def unregister(name: str) -> None:
    """Remove a codec added by `register`."""
    get(name)
    del _CODECS[name]
