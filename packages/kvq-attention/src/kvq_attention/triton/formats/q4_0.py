"""q4_0 in Triton's kernels; its bytes: `kvq_codecs.formats.q4_0`."""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_codecs.formats import q4_0 as oracle
