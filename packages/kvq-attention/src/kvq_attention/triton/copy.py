"""Copying whole pages: one launch serves up to eight planes that are laid out alike.

Bytes are copied in the largest words that the addresses of all of them allow, whatever they hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import triton.language as tl

from kvq_attention import launches
from kvq_attention.triton.jit import kernel
from kvq_attention.verify import check_rows
from kvq_codecs import Encoded

BACKEND = "triton"
WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}  # by bytes, widest first
PLANES_A_LAUNCH = (8, 4, 2, 1)  # few numbers, since each is compiled by itself
BLOCK_WORDS = 1024


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the words of a page lie.

    Attributes
    ----------
    word_bytes : size of a word
    page_stride : words from one page to the next
    shape : the words of a page, heads × tokens × items, axes joined where they lie one after the
        other
    strides : of the first two of those axes, in words
    """

    word_bytes: int
    page_stride: int
    shape: tuple[int, int, int]
    strides: tuple[int, int]

    @classmethod
    def of(cls, plane: torch.Tensor) -> Layout:
        """The layout of a plane [P, Hkv, N, items] whose rows are contiguous."""
        item_bytes = plane.dtype.itemsize
        page, head, token, _ = (stride * item_bytes for stride in plane.stride())
        _, heads, tokens, items = plane.shape
        run = items * item_bytes
        axes: list[tuple[int, int]] = []  # lengths and strides of what does not join the run
        for length, stride in ((tokens, token), (heads, head)):
            if length == 1:
                continue
            if not axes and stride == run:
                run *= length
            else:
                axes.append((length, stride))
        numbers = plane.data_ptr(), page, run, *(stride for _, stride in axes)
        word = next(size for size in WORDS if not any(n % size for n in numbers))
        (middle, middle_step), (outer, outer_step) = (*axes, (1, 0), (1, 0))[:2]
        return cls(
            word,
            page // word,
            (outer, middle, run // word),
            (outer_step // word, middle_step // word),
        )

    @property
    def words(self) -> int:
        """Words of a page."""
        return math.prod(self.shape)


def copy_pages(
    caches: Sequence[Encoded], source_pages: torch.Tensor, target_pages: torch.Tensor
) -> None:
    """Copy whole pages: see `kvq_attention.ops.copy_pages`.

    Ids are not read on the host: a pair with one outside [0, P) is skipped, like −1.
    """
    num_pairs = source_pages.shape[0]
    if num_pairs == 0:
        return
    num_pages = caches[0].lead[0]
    for layout, planes in launches_of(caches):
        blocks = -(-layout.words // BLOCK_WORDS)
        _copy[(num_pairs * blocks, len(planes))](
            planes,
            source_pages,
            target_pages,
            source_pages.stride(0),
            target_pages.stride(0),
            num_pages,
            WORD=WORDS[layout.word_bytes],
            PAGE_STRIDE=layout.page_stride,
            SHAPE=layout.shape,
            STRIDES=layout.strides,
            BLOCKS=blocks,
            BLOCK=BLOCK_WORDS,
            num_warps=4,
        )
    launches.record(BACKEND, "copy_pages")


def launches_of(
    caches: Sequence[Encoded],
) -> Iterator[tuple[Layout, tuple[torch.Tensor, ...]]]:
    """The planes of all caches, those of one layout together, as many as a launch takes."""
    alike: dict[Layout, list[torch.Tensor]] = {}
    for index, cache in enumerate(caches):
        for name, plane in cache.planes.items():
            check_rows(f"plane {name!r} of caches[{index}]", plane)
            alike.setdefault(Layout.of(plane), []).append(plane)
    for layout, planes in alike.items():
        start = 0
        while start < len(planes):
            count = next(size for size in PLANES_A_LAUNCH if size <= len(planes) - start)
            yield layout, tuple(planes[start : start + count])
            start += count


@kernel(do_not_specialize=["num_pages"])
def _copy(
    planes,
    source_pages,
    target_pages,
    source_step,
    target_step,
    num_pages,
    WORD: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    SHAPE: tl.constexpr,
    STRIDES: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pair = (tl.program_id(0) // BLOCKS).to(tl.int64)
    source = tl.load(source_pages + pair * source_step)
    target = tl.load(target_pages + pair * target_step)
    if (source >= 0) & (source < num_pages) & (target >= 0) & (target < num_pages):
        index = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
        outer = (index // (SHAPE[1] * SHAPE[2])).to(tl.int64)
        middle = (index // SHAPE[2] % SHAPE[1]).to(tl.int64)
        where = outer * STRIDES[0] + middle * STRIDES[1] + index % SHAPE[2]
        mask = index < SHAPE[0] * SHAPE[1] * SHAPE[2]
        for i in tl.static_range(len(planes)):
            if tl.program_id(1) == i:
                plane = planes[i].to(tl.pointer_type(WORD), bitcast=True)
                words = tl.load(plane + source * PAGE_STRIDE + where, mask=mask)
                tl.store(plane + target * PAGE_STRIDE + where, words, mask=mask)
