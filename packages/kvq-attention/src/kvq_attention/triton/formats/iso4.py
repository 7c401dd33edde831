"""iso4 in Triton's kernels; its bytes: `kvq_codecs.formats.iso4`."""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_codecs.formats import iso4 as oracle
