"""fp32 in Triton's kernels; its bytes: `kvq_codecs.formats.fp32`."""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_codecs.formats import fp32 as oracle
