"""Where a backend was measured to be the fastest: `auto` takes it there and nowhere else.

Data, for each GPU architecture; a region comes with the records that show it, by the rule that
`kvq_attention.bench.fastest` states and applies: that prints them. Page sizes and numbers of query
heads between two measured ones count with them, none beyond.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch

from kvq_attention.needs import Need

# Backends that `auto` takes by measurement; the others it takes wherever they serve.
MEASURED = ("cuda",)


@dataclass(frozen=True, slots=True)
class Region:
    """Calls that a backend serves faster than every other, over the cases that were measured.

    Attributes
    ----------
    backend, op : what was measured
    formats : codec names (of K, of V)
    head_dims, page_tokens : values a row, tokens a page
    groups : query heads a KV head
    shown_by : paths, in this repository, of the records of `kvq bench attention`
    """

    backend: str
    op: str
    formats: tuple[tuple[str, str], ...]
    head_dims: tuple[int, ...]
    page_tokens: tuple[int, ...]
    groups: range
    shown_by: tuple[str, ...]

    def holds(self, backend: str, need: Need) -> bool:
        """Whether a call lies in the region of this backend."""
        return (
            (self.backend, self.op) == (backend, need.op)
            and (need.k, need.v) in self.formats
            and {need.k_dim, need.v_dim} <= {*self.head_dims}
            and need.page_tokens in self.page_tokens
            and need.group in self.groups
        )


# Formats that decode=cuda was measured with and is the fastest for: by more than a half where
# requests are few or short. 128 of 1,024 tokens of 16-bit formats triton decodes faster, by up to a
# tenth, and by more of bf16 in pages of 64.
_PACKED = (
    *((codec, codec) for codec in ("q8_0", "q6_0", "q4_0", "fp8_e4m3", "fp8")),
    *((codec, codec) for codec in ("nvfp4", "iso3", "iso4")),
    ("q8_0", "q4_0"),
)
_WIDE = (("bf16", "bf16"), ("fp16", "fp16"))
_H200 = (
    "docs/benchmarks/attention-h200.json",
    "docs/benchmarks/attention-layers-h200.json",
)

# Compute capability (90 is 9.0) → regions.
FASTEST: dict[int, tuple[Region, ...]] = {
    90: (
        Region("cuda", "decode", (*_PACKED, *_WIDE), (128,), (16,), range(1, 9), _H200),
        # pages of 32 were not measured: they lie between those of 16 and 64
        Region("cuda", "decode", _PACKED, (128,), (32, 64), range(4, 5), _H200),
    ),
}


def fastest(backend: str, needs: Iterable[Need]) -> bool:
    """Whether a backend was measured to be the fastest for all of these calls on all GPUs here."""
    regions = [FASTEST.get(level, ()) for level in levels()]
    needs = list(needs)
    return bool(needs) and all(
        need.device == "cuda" and any(region.holds(backend, need) for region in known)
        for need in needs
        for known in regions
    )


@cache
def levels() -> tuple[int, ...]:
    """Compute capabilities of the GPUs that torch sees; 0 where there are none."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return (0,)
    found = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    return tuple(sorted(10 * major + minor for major, minor in found))
