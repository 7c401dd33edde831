"""Exact byte formats for quantized KV caches: the specification and its oracle.

>>> import numpy as np, kvq_codecs
>>> codec = kvq_codecs.get("q4_0")
>>> codec.spec.row_bytes(128)
72
>>> encoded = codec.encode(np.ones((2, 128), np.float32))
>>> codec.decode(encoded).shape
(2, 128)
"""

from kvq_codecs.codec import Codec
from kvq_codecs.encoded import Encoded
from kvq_codecs.errors import CodecError, PlaneError, RowError, UnknownCodecError
from kvq_codecs.registry import get, names, register, unregister
from kvq_codecs.spec import Plane, Spec

__version__ = "0.1.0"

__all__ = [
    "Codec",
    "CodecError",
    "Encoded",
    "Plane",
    "PlaneError",
    "RowError",
    "Spec",
    "UnknownCodecError",
    "__version__",
    "get",
    "names",
    "register",
    "unregister",
]
