"""What `kvq_attention.ops` calls of this backend."""

from __future__ import annotations

from kvq_attention.triton.compat import unavailable
from kvq_attention.triton.decode import decode

__all__ = ["decode", "unavailable"]
