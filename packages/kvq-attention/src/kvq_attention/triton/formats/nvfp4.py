"""nvfp4 in Triton's kernels; its bytes: `kvq_codecs.formats.nvfp4`."""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_codecs.formats import nvfp4 as oracle
