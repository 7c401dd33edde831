"""bf16 in Triton's kernels; its bytes: `kvq_codecs.formats.bf16`."""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_codecs.formats import bf16 as oracle
