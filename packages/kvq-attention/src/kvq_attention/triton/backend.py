"""What `kvq_attention.ops` calls of this backend."""

from __future__ import annotations

from kvq_attention.triton.compat import unavailable
from kvq_attention.triton.copy import copy_pages
from kvq_attention.triton.decode import decode
from kvq_attention.triton.extending.launch import extend, extend_reads_host, extend_routes
from kvq_attention.triton.store import store

__all__ = [
    "copy_pages",
    "decode",
    "extend",
    "extend_reads_host",
    "extend_routes",
    "store",
    "unavailable",
]
