import pytest
import torch

from kvq_attention import ops
from kvq_attention.accuracy import MAX_ERROR
from kvq_attention.bench.cases import Case, Formats, Shape
from kvq_attention.bench.checks import decode_error, stored_exactly
from kvq_attention.bench.data import TIER, batches, empty_pool, fill, random_rows

CASE, SHAPE = Case(3, 70), Shape(6, 2, 64)
LIMIT = MAX_ERROR[torch.bfloat16]


@pytest.fixture(params=["bf16", "q4_0", "nvfp4"])
def attended(request):
    random = torch.Generator().manual_seed(5)
    (batch,) = batches(CASE, 16, 1, random)
    pool = empty_pool(Formats(request.param, "q8_0"), SHAPE, 15, 16, "cpu")
    fill(pool, SHAPE, "reference", random)
    q = random_rows(CASE.batch, SHAPE, SHAPE.heads, random)
    out = ops.decode(q, pool.k, pool.v, batch, TIER, scale=SHAPE.dim**-0.5)
    return q, out, pool, batch


def error(q, out, pool, batch):
    return decode_error(q, out, pool, batch, CASE, SHAPE)


def test_a_right_output_is_within_the_limit(attended):
    assert 0 < error(*attended) < LIMIT


@pytest.mark.parametrize("where", [(0, 0), (1, 3), (2, 5)])
def test_a_wrong_row_among_the_sampled_is_seen(attended, where):
    q, out, pool, batch = attended
    out[where] *= 1.01
    assert error(q, out, pool, batch) > LIMIT


def test_one_token_too_few_is_seen(attended):
    q, _, pool, batch = attended
    short = type(batch)(batch.query_offsets, batch.seq_lens - 1, batch.tables, 16)
    out = ops.decode(q, pool.k, pool.v, short, TIER, scale=SHAPE.dim**-0.5)
    assert error(q, out, pool, batch) > LIMIT


def test_a_nan_anywhere_is_no_error_that_could_be_small(attended):
    q, out, pool, batch = attended
    out[1, 1, 7] = torch.nan
    assert error(q, out, pool, batch) == torch.inf


def test_a_stored_byte_that_differs_is_seen():
    random = torch.Generator().manual_seed(6)
    pool = empty_pool(Formats("iso4", "fp8"), Shape(2, 2, 128), 2, 16, "cpu")
    k, v = (random_rows(20, Shape(2, 2, 128), 2, random) for _ in "kv")
    slots = torch.randperm(32, generator=random)[:20]
    ops.store(k, v, pool.k, pool.v, slots)
    assert stored_exactly(pool, slots, ((pool.k, k), (pool.v, v)))
    pool.v.planes["codes"][int(slots[19]) // 16, 1, int(slots[19]) % 16, 127] ^= 1
    assert not stored_exactly(pool, slots, ((pool.k, k), (pool.v, v)))
