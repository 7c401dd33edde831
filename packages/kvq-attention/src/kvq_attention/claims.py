"""What works with what: a row is one claim, and names the test that proves it."""

from __future__ import annotations

import torch

from kvq_attention.cuda import formats
from kvq_attention.needs import Row, name_of
from kvq_codecs.registry import BUILT_IN

# Codecs that Triton has no kernels for, and why.
WITHOUT_TRITON: dict[str, str] = {}
TRITON_CODECS = tuple(name for name in BUILT_IN if name not in WITHOUT_TRITON)
TRITON_HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
TRITON_PAGE_TOKENS = (16, 32, 64, 128)

# Codecs that CUDA has no kernels for, and why.
WITHOUT_CUDA = {"fp32": "its values do not fit in the halves that tensor cores multiply"}
CUDA_CODECS = tuple(name for name in BUILT_IN if name in formats.TYPES)
CUDA_HEAD_DIMS = (64, 128, 256)
CUDA_PAGE_TOKENS = (16, 32, 64, 128)
CUDA_MOST_GROUP = 16  # query rows of a tile; what has more is Triton's
CUDA_QUERY_DTYPES = {"bf16": (torch.bfloat16,)}  # tensor cores multiply bf16 with bf16 alone


def _triton(op: str, feature: str, proof: str) -> Row:
    return Row(
        *(op, "triton", feature, proof),
        codecs=TRITON_CODECS,
        head_dims=TRITON_HEAD_DIMS,
        page_tokens=TRITON_PAGE_TOKENS,
        devices=("cuda", "cpu"),
    )


def _cuda(feature: str, proof: str) -> Row:
    return Row(
        *("decode", "cuda", feature, proof),
        codecs=CUDA_CODECS,
        head_dims=CUDA_HEAD_DIMS,
        page_tokens=CUDA_PAGE_TOKENS,
        devices=("cuda",),
        most_group=CUDA_MOST_GROUP,
        query_dtypes=CUDA_QUERY_DTYPES,
    )


SUPPORT: tuple[Row, ...] = (
    Row("store", "reference", "plain", "test_store_writes_the_bytes_of_every_codec"),
    Row("store", "reference", "mixed_codecs", "test_store_takes_two_codecs"),
    Row("store", "reference", "value_dim", "test_store_takes_two_head_dims"),
    Row("store", "reference", "float64", "test_p051_store_takes_every_float_dtype"),
    Row("decode", "reference", "plain", "test_decode_attends_over_every_codec"),
    Row("decode", "reference", "mixed_codecs", "test_decode_reads_two_codecs"),
    Row("decode", "reference", "value_dim", "test_decode_reads_two_head_dims"),
    Row("decode", "reference", "gqa", "test_decode_shares_kv_heads"),
    Row("decode", "reference", "window", "test_decode_slides_a_window"),
    Row("decode", "reference", "softcap", "test_decode_caps_scores"),
    Row("decode", "reference", "sinks", "test_decode_joins_sinks"),
    Row("decode", "reference", "float64", "test_p051_decode_takes_every_query_dtype"),
    Row("extend", "reference", "plain", "test_extend_attends_over_every_codec"),
    Row("extend", "reference", "mixed_codecs", "test_extend_reads_two_codecs"),
    Row("extend", "reference", "value_dim", "test_extend_reads_two_head_dims"),
    Row("extend", "reference", "gqa", "test_extend_shares_kv_heads"),
    Row("extend", "reference", "window", "test_extend_slides_a_window"),
    Row("extend", "reference", "softcap", "test_extend_caps_scores"),
    Row("extend", "reference", "sinks", "test_extend_joins_sinks"),
    Row("extend", "reference", "float64", "test_p051_extend_takes_every_dtype"),
    Row("copy_pages", "reference", "plain", "test_copy_pages_copies_every_plane"),
    _triton("store", "plain", "test_triton_stores_the_bytes_of_every_codec"),
    _triton("store", "mixed_codecs", "test_triton_stores_two_codecs"),
    _triton("store", "value_dim", "test_triton_stores_two_head_dims"),
    _triton("decode", "plain", "test_triton_decodes_every_codec"),
    _triton("decode", "mixed_codecs", "test_triton_decodes_two_codecs"),
    _triton("decode", "value_dim", "test_triton_decodes_two_head_dims"),
    _triton("decode", "gqa", "test_triton_decodes_shared_kv_heads"),
    _triton("decode", "window", "test_triton_decodes_a_window"),
    _triton("decode", "softcap", "test_triton_decodes_capped_scores"),
    _triton("decode", "sinks", "test_triton_decodes_sinks"),
    _triton("extend", "plain", "test_triton_extends_every_codec"),
    _triton("extend", "mixed_codecs", "test_triton_extends_two_codecs"),
    _triton("extend", "value_dim", "test_triton_extends_two_head_dims"),
    _triton("extend", "gqa", "test_triton_extends_shared_kv_heads"),
    _triton("extend", "window", "test_triton_extends_a_window"),
    _triton("extend", "softcap", "test_triton_extends_capped_scores"),
    _triton("extend", "sinks", "test_triton_extends_sinks"),
    Row("copy_pages", "triton", "plain", "test_triton_copies_pages", devices=("cuda", "cpu")),
    _cuda("plain", "test_cuda_decodes_every_codec"),
    _cuda("mixed_codecs", "test_cuda_decodes_two_codecs"),
    _cuda("gqa", "test_cuda_decodes_shared_kv_heads"),
    _cuda("window", "test_cuda_decodes_a_window"),
    _cuda("softcap", "test_cuda_decodes_capped_scores"),
    _cuda("sinks", "test_cuda_decodes_sinks"),
)


def markdown() -> str:
    """The table as a reference page."""
    lines = [
        "# What works with what",
        "",
        "A call needs `plain` and every feature it uses; each row is proven by the test it names.",
        "",
        "| backend | op | feature | codecs | head_dim | page tokens | devices "
        "| query heads a KV head | queries | proven by |",
        f"|{' --- |' * 10}",
    ]
    for row in SUPPORT:
        cells = [
            *(row.backend, row.op, row.feature),
            *(_cell(row.codecs, "every"), _cell(row.head_dims, "as the codec allows")),
            *(_cell(row.page_tokens, "any"), _cell(row.devices, "any")),
            *("any" if row.most_group is None else f"≤ {row.most_group}", _queries(row)),
            f"`{row.proof}`",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _queries(row: Row) -> str:
    limits = row.query_dtypes.items()
    said = [f"{', '.join(map(name_of, dtypes))} beside {codec}" for codec, dtypes in limits]
    return "; ".join(said) or "any"


def _cell(values: tuple[str, ...] | tuple[int, ...] | None, every: str) -> str:
    return every if values is None else ", ".join(map(str, values))
