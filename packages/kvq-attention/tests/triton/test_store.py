"""What the Triton store kernel writes: the oracle's bytes, in the slots named, and nothing else."""

from __future__ import annotations

import pytest
import torch

import kvq_codecs
from kvq_attention import UnsupportedError, launches, ops
from kvq_attention.triton import store as kernel
from kvq_attention.triton.store_tiles import Config, Tile, pick_tile
from kvq_codecs import Encoded

from ..decode.cases import DTYPES, PAGE_TOKENS, ieee
from ..scene import assert_same_bytes, poisoned
from .cases import DIMS, dims_of, each_codec, each_device
from .stored import PAGES, check, pair, rows, some_slots

pytestmark = ieee


@pytest.mark.proves("triton.store.plain")
@each_codec
@each_device
def test_triton_stores_the_bytes_of_every_codec(codec: str, device: str) -> None:
    dim = dims_of(codec)[0]
    check(*pair(19, 2, dim), (codec, codec), device)


@pytest.mark.proves("triton.store.mixed_codecs")
@pytest.mark.parametrize(
    "codecs",
    [("q8_0", "q4_0"), ("iso3", "fp8"), ("nvfp4", "bf16"), ("fp32", "iso4"), ("fp16", "q6_0")],
)
@each_device
def test_triton_stores_two_codecs(codecs: tuple[str, str], device: str) -> None:
    with launches.counting() as launched:
        check(*pair(9, 2, 128), codecs, device)
    assert launched["triton"]["store"] == 1, "K and V share a launch"


@pytest.mark.proves("triton.store.value_dim")
@pytest.mark.parametrize("codecs", [("fp8", "fp8"), ("q6_0", "iso4"), ("nvfp4", "q8_0")])
@each_device
def test_triton_stores_two_head_dims(codecs: tuple[str, str], device: str) -> None:
    check(*pair(9, 3, 64, 256), codecs, device)


@each_codec
@each_device
def test_p054_p086_every_head_dim_of_every_codec(codec: str, device: str) -> None:
    """Those that are no power of two, or no multiple of the codec's block, are told so."""
    for dim in DIMS:
        if dim in dims_of(codec):
            check(*pair(5, 1, dim), (codec, codec), device)
        else:
            with pytest.raises(kvq_codecs.RowError, match=f"head_dim {dim} is not a multiple"):
                poisoned(codec, 1, 1, 16, dim, device)


@pytest.mark.parametrize("codec", ["bf16", "fp8"])
@each_device
def test_head_dims_that_threads_cannot_share_are_refused(codec: str, device: str) -> None:
    caches = [poisoned(codec, 1, 1, 16, 20, device) for _ in range(2)]
    k = torch.zeros(1, 1, 20, device=device)
    with pytest.raises(UnsupportedError, match=r"head_dim.* 20"):
        ops.store(k, k, *caches, torch.zeros(1, dtype=torch.int64, device=device), backend="triton")
    with pytest.raises(UnsupportedError, match=r"head_dims that \d+ divides, not 20; the refer"):
        kernel.store(k, k, *caches, torch.zeros(1, dtype=torch.int64, device=device))


@each_codec
@each_device
def test_p057_every_page_size(codec: str, device: str) -> None:
    k, v = pair(3, 1, dims_of(codec)[0])
    for page_tokens in PAGE_TOKENS:
        check(k, v, (codec, "bf16"), device, page_tokens=page_tokens)
    # The kernel takes any; the table claims those that decode has, too.
    for page_tokens in (1, 5, 256):
        check(k, v, (codec, "bf16"), device, page_tokens=page_tokens, store=kernel.store)


@each_codec
@each_device
def test_p001_each_source_has_its_own_pitch(codec: str, device: str) -> None:
    dim, count, heads = dims_of(codec)[0], 7, 2
    qkv = rows(count, 1, 3 * heads * dim, seed=2)[:, 0]
    packed_k = qkv[:, heads * dim : 2 * heads * dim].unflatten(1, (heads, dim))
    packed_v = qkv[:, 2 * heads * dim :].unflatten(1, (heads, dim))
    check(packed_k, packed_v.contiguous(), (codec, codec), device)
    by_head = packed_k.transpose(0, 1).contiguous().transpose(0, 1)  # as transformers hands them
    check(by_head, packed_v, (codec, codec), device)


@pytest.mark.parametrize("codec", ["bf16", "q4_0", "nvfp4", "iso3"])
@each_device
def test_values_of_a_row_may_lie_apart(codec: str, device: str) -> None:
    apart = rows(5, 2, 2 * 128)[..., ::2]
    across = rows(128, 2, 5, seed=1).permute(2, 1, 0)
    assert apart.stride(2) == 2
    assert across.stride(2) == 10

    def keep_strides(
        k: torch.Tensor, v: torch.Tensor, k_cache: Encoded, v_cache: Encoded, slots: torch.Tensor
    ) -> None:
        whole = torch.zeros(5, 2, 256, device=device)
        whole[..., ::2] = k
        kernel.store(whole[..., ::2], v, k_cache, v_cache, slots)

    check(apart, across, (codec, codec), device, store=keep_strides)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_codec
@each_device
def test_p051_every_float_dtype(codec: str, dtype: torch.dtype, device: str) -> None:
    k, v = pair(4, 2, dims_of(codec)[0])
    check(k.to(dtype), v, (codec, codec), device)
    check(k, v.to(dtype), (codec, codec), device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_device
def test_rows_of_a_graph_and_rows_with_a_pending_sign(dtype: torch.dtype, device: str) -> None:
    def lazily(
        k: torch.Tensor, v: torch.Tensor, k_cache: Encoded, v_cache: Encoded, slots: torch.Tensor
    ) -> None:
        kernel.store(k.clone().requires_grad_(), torch._neg_view(-v), k_cache, v_cache, slots)

    k, v = (x.to(dtype) for x in pair(3, 2, 64))
    check(k, v, ("q8_0", "bf16"), device, store=lazily)


@each_device
def test_float64_is_refused_with_the_backend_that_has_it(device: str) -> None:
    k = torch.zeros(1, 1, 64, dtype=torch.float64, device=device)
    caches = [poisoned("q8_0", 1, 1, 16, 64, device) for _ in range(2)]
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(UnsupportedError, match=r"float64.*reference"):
        ops.store(k, k, *caches, slots, backend="triton")
    with pytest.raises(UnsupportedError, match=r"float64.*reference"):
        kernel.store(k, k, *caches, slots)


@each_codec
@each_device
def test_slots_that_the_cache_does_not_have_are_not_written(codec: str, device: str) -> None:
    k, v = pair(10, 2, dims_of(codec)[0])
    slots = [-1, 37, 96, 21, -2, 2**40, 95, -(2**40), -1, 0]
    check(k, v, (codec, codec), device, slots=slots, store=kernel.store)


@each_device
def test_nothing_is_launched_for_no_tokens(device: str) -> None:
    with launches.counting() as launched:
        check(*pair(0, 2, 64), ("q4_0", "bf16"), device, slots=[])
    assert launched["triton"]["store"] == 0


@each_device
def test_slots_may_be_a_column(device: str) -> None:
    def in_a_column(
        k: torch.Tensor, v: torch.Tensor, k_cache: Encoded, v_cache: Encoded, slots: torch.Tensor
    ) -> None:
        wide = torch.full((len(slots), 3), -1, dtype=torch.int64, device=device)
        wide[:, 1] = slots
        kernel.store(k, v, k_cache, v_cache, wide[:, 1])

    check(*pair(5, 1, 64), ("q8_0", "q4_0"), device, store=in_a_column)


@pytest.mark.parametrize("heads", [1, 3, 5, 8, 12])
@pytest.mark.parametrize("codec", ["q4_0", "fp8", "iso4"])
@each_device
def test_any_number_of_heads(codec: str, heads: int, device: str) -> None:
    check(*pair(3, heads, 128), (codec, "q8_0"), device)


@each_codec
@each_device
def test_p074_bytes_do_not_depend_on_the_batch_or_the_launch(codec: str, device: str) -> None:
    dim, count, codecs = dims_of(codec)[0], 3, (codec, "bf16")
    k, v = (x.to(device) for x in pair(count, 2, dim))
    slots = torch.tensor(some_slots(count, PAGES * 16), device=device)
    together, token_by_token, other_launch = (
        [poisoned(name, PAGES, 2, 16, dim, device) for name in codecs] for _ in range(3)
    )
    kernel.store(k, v, *together, slots)
    for i in range(count):
        part = slice(i, i + 1)
        kernel.store(k[part], v[part], *token_by_token, slots[part])
    spans = [pick_tile(kernel.encoder_of(cache), dim, 2, 128).span for cache in together]
    config = Config(Tile(2, 2, spans[0]), Tile(4, 1, spans[1]), num_warps=1)
    kernel.launch(k, v, *other_launch, slots, config=config)
    for other in (token_by_token, other_launch):
        for got, wanted in zip(other, together, strict=True):
            assert_same_bytes(got, wanted)


@pytest.mark.parametrize("codec", kvq_codecs.names())
def test_a_tile_gives_every_thread_a_span(codec: str) -> None:
    """Rows padded to a power of two of spans fill the threads, whatever the heads."""
    encoder = kernel.formats.get(codec).ENCODER
    for dim in dims_of(codec):
        for heads in (1, 2, 3, 8, 96):
            for threads in (32, 128):
                tile = pick_tile(encoder, dim, heads, threads)
                spans = -(-dim // tile.span)
                assert dim % tile.span == 0
                assert heads % tile.heads == 0
                row_threads = 1 << (spans - 1).bit_length()
                assert tile.tokens * tile.heads * row_threads == max(threads, row_threads)
