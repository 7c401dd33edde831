"""fp8 in Triton's kernels; its bytes: `kvq_codecs.formats.fp8`."""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_codecs.formats import fp8 as oracle
