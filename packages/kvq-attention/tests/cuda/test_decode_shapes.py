"""The launch shape that is picked: it fits, and no launch shape moves a bit of a result."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

import kvq_codecs
from kvq_attention import Scoring
from kvq_attention.cuda import decode, formats, items, shapes
from kvq_attention.cuda.compile import source

from ..decode.places import EMULATED, KINDS
from ..scene import TIER, Scene
from . import emulated
from .emulator.program import build, needs_compiler

# KiB of shared memory of a multiprocessor (CUDA's programming guide, compute capabilities), and of
# those a block's 1 KiB less
SHARED_KIB = (99, 100, 163, 164, 227, 228)
MOST_BLOCKS = 32  # that a multiprocessor holds at once, of any GPU
REGISTERS = 65536
DIMS = EMULATED.dims
ROWS = (1, 4, 5, 8, 9, 16, 17, 200)


def pairs(dim: int) -> list[tuple[str, str]]:
    """Every pair of formats that store such a head_dim."""
    stored = [name for name in EMULATED.codecs if dim in EMULATED.dims_of(name)]
    return list(product(stored, stored))


def test_every_codec_but_fp32_has_kernels() -> None:
    assert set(kvq_codecs.names()) - set(formats.TYPES) == {"fp32"}
    for name in formats.TYPES:
        text = source("decode.cu", defines_of(name, name, 128, shape_of(name, name, 128, 4)))
        assert f"struct {formats.get(name).type} " in text


def shape_of(k: str, v: str, dim: int, rows: int, kib: int = 228) -> shapes.Shape:
    return shapes.pick(decode.sizes(k, v, dim), rows, kib << 10)


def defines_of(k: str, v: str, dim: int, shape: shapes.Shape) -> dict[str, str | int]:
    given: dict[str, str | int] = decode.defines(k, v, dim, torch.float32, shape, False, True)
    return given


@pytest.mark.parametrize("kib", SHARED_KIB)
@pytest.mark.parametrize("dim", DIMS)
def test_every_pair_of_formats_gets_a_launch_that_fits(dim: int, kib: int) -> None:
    checked = 0
    for (k, v), rows in product(pairs(dim), ROWS):
        shape = shape_of(k, v, dim, rows, kib)
        assert shape.rows in (4, 8, 16) and shape.rows >= min(rows, 16)
        assert shape.stages >= 2, "copies run ahead"
        taken = shape.shared_bytes(decode.sizes(k, v, dim))
        assert 1 <= shape.blocks <= MOST_BLOCKS
        assert shape.blocks * (taken + shapes.DRIVER_BYTES) <= kib << 10
        assert REGISTERS // (shape.blocks * shape.threads) >= 64
        assert shape.threads <= 1024
        assert items.CHUNK_STEP % (shape.tiles * items.TILE) == 0, "chunks are whole steps"
        checked += 1
    assert checked >= 64 * len(ROWS)


def test_more_shared_memory_makes_no_launch_smaller() -> None:
    for dim in DIMS:
        for (k, v), rows in product(pairs(dim), ROWS):
            picked = [shape_of(k, v, dim, rows, kib) for kib in sorted(SHARED_KIB)]
            tabled = [shape.tabled for shape in picked]
            assert tabled == sorted(tabled)
            for kind in (False, True):
                warps = [s.blocks * s.warps for s in picked if s.tabled is kind]
                assert warps == sorted(warps)


def test_what_decides_the_last_bits_knows_nothing_of_the_batch() -> None:
    """Nor, but for tables of codes, of the GPU."""
    for dim in DIMS:
        for k, v in pairs(dim):
            found = {shape_of(k, v, dim, *given).tiles for given in product(ROWS, SHARED_KIB)}
            assert len(found) == 1, (k, v, dim)
            for kib in SHARED_KIB:
                tabled = {shape_of(k, v, dim, rows, kib).tabled for rows in ROWS}
                assert len(tabled) == 1, (k, v, dim, kib)


def test_what_fits_nowhere_is_refused() -> None:
    sizes = decode.sizes("bf16", "bf16", 256)
    shape = shapes.pick(sizes, 16, 228 << 10)
    least = shape.shared_bytes(sizes) + shapes.DRIVER_BYTES
    assert shapes.pick(sizes, 16, least).blocks == 1
    said = (
        rf"^a block takes {least} bytes of shared memory for tokens of {sizes.token_bytes} "
        rf"bytes; a multiprocessor has {least - 1}$"
    )
    with pytest.raises(ValueError, match=said):
        shapes.pick(sizes, 16, least - 1)


@needs_compiler
def test_rows_take_the_bytes_that_are_counted() -> None:
    """Of every format: a pair's are the sum, and each compilation asserts the whole."""
    lines = ['#include "tile.cuh"']
    lines += [f'#include "{formats.get(name).header}"' for name in formats.TYPES]
    for name in formats.TYPES:
        for dim in EMULATED.dims_of(name):
            layout = f"Layout<{formats.get(name).type}, {dim}>"
            row_bytes = kvq_codecs.get(name).spec.row_bytes(dim)
            lines += [f"static_assert({layout}::BYTES == {items.TILE} * {row_bytes});"]
    lines += ['extern "C" GLOBAL void none() {}']
    build("\n".join(lines), ["none"], defines=items.constants())
    wrong = lines[-2].replace("==", "!=")
    with pytest.raises(RuntimeError, match="static assertion failed"):
        build("\n".join([*lines, wrong]), ["none"], defines=items.constants())


@needs_compiler
def test_a_block_that_takes_other_bytes_than_are_counted_does_not_compile() -> None:
    given = defines_of("q4_0", "q8_0", 64, shape_of("q4_0", "q8_0", 64, 4))
    given["SET_SHARED_BYTES"] = int(given["SET_SHARED_BYTES"]) + 16
    text = (emulated.SOURCE / "decode.cu").read_text()
    with pytest.raises(RuntimeError, match=r"static assertion failed: as shapes\.py counts"):
        build(text, ["decode"], defines=given)


def scene_of(codec: str) -> Scene:
    """A request in one chunk, others in more; several groups of rows where a block takes 4."""
    lengths, queries = (1, 300, 70, 600), (1, 3, 0, 2)
    shape = {"heads": 6, "kv_heads": 2, "dim": 128, "lengths": lengths, "queries": queries}
    return EMULATED.scene(codec, **shape, seed=21)


@needs_compiler
@pytest.mark.parametrize("codec", [codec for codec in KINDS if codec in EMULATED.codecs])
def test_every_shape_that_can_be_picked_gives_the_same_bits(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = scene_of(codec)
    shapes_picked = {
        # what registers are to hold changes nothing on a CPU, but would be compiled
        replace(shape_of(codec, codec, 128, rows, kib), blocks=1)
        for rows, kib in product(ROWS, SHARED_KIB)
    }
    assert len(shapes_picked) >= 3
    emulated.emulate(monkeypatch)
    scoring = Scoring(scene.scale)
    outs = [
        decode.launch(scene.q, *scene.caches, scene.batch(), TIER, scoring, shape)
        for shape in shapes_picked
    ]
    for out in outs[1:]:
        assert torch.equal(out, outs[0])


@needs_compiler
@pytest.mark.parametrize("codec", [codec for codec in KINDS if codec in EMULATED.codecs])
def test_the_number_of_blocks_at_once_changes_no_bit(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where their runs begin and end, nor which merge there is."""
    scene = scene_of(codec)
    scoring = {"window": 290, "sinks": torch.linspace(-1, 1, 6)}
    plain, more = EMULATED.attend(scene), EMULATED.attend(scene, **scoring)
    assert torch.isfinite(plain).all() and not torch.equal(plain, more)
    for resident in (1, 2, 4, 7, 10**6):
        monkeypatch.setattr(emulated, "RESIDENT", resident)
        assert torch.equal(EMULATED.attend(scene), plain), resident
        assert torch.equal(EMULATED.attend(scene, **scoring), more), resident


@needs_compiler
@pytest.mark.parametrize("codec", [codec for codec in KINDS if codec in EMULATED.codecs])
def test_neither_the_order_of_lanes_nor_when_copies_arrive_changes_a_bit(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a barrier or a wait is missing."""
    scene = scene_of(codec)
    plain = EMULATED.attend(scene)
    for order in product((False, True), (False, True)):
        monkeypatch.setattr(emulated, "ORDER", dict(zip(("late", "backward"), order, strict=True)))
        assert torch.equal(EMULATED.attend(scene), plain), order
