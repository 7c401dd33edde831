"""Attention that writes and reads quantized paged KV caches.

`ops.store`, `ops.decode`, `ops.extend` and `ops.copy_pages` are the operations; `Batch` and
`Table` say which requests a call serves and where their tokens lie; `SUPPORT` says what
works with what; `launches` counts what ran.
"""

from kvq_attention import launches, ops, support
from kvq_attention.batch import Batch, Request, Table
from kvq_attention.claims import SUPPORT
from kvq_attention.errors import (
    AttentionError,
    BatchError,
    DeviceError,
    SlotError,
    TensorError,
    UnsupportedError,
)
from kvq_attention.scoring import Scoring

__version__ = "0.1.0"

__all__ = [
    "SUPPORT",
    "AttentionError",
    "Batch",
    "BatchError",
    "DeviceError",
    "Request",
    "Scoring",
    "SlotError",
    "Table",
    "TensorError",
    "UnsupportedError",
    "__version__",
    "launches",
    "ops",
    "support",
]
