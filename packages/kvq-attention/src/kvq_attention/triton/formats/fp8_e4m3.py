"""fp8_e4m3 in Triton's kernels; its bytes: `kvq_codecs.formats.fp8_e4m3`."""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_codecs.formats import fp8_e4m3 as oracle
