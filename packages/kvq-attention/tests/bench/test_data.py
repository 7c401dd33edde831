import pytest
import torch

import kvq_codecs
from kvq_attention.bench import data
from kvq_attention.bench.cases import Case, Formats, Shape
from kvq_attention.bench.data import TIER, batches, calls_for, empty_pool, fill, row_bytes

SHAPE = Shape(4, 2, 64)


def generator():
    return torch.Generator().manual_seed(3)


def test_together_the_calls_read_every_page_once_in_another_order():
    steps = batches(Case(3, 33), 16, 5, generator())
    assert len(steps) == 5
    pages = torch.cat([step.table(TIER).page_table.flatten() for step in steps])
    assert pages.sort().values.tolist() == list(range(5 * 3 * 3))
    assert pages.tolist() != pages.sort().values.tolist()
    for step in steps:
        assert step.seq_lens.tolist() == [33] * 3
        assert (step.table(TIER).slot_mapping % 16 == 0).all()  # the 33rd token
        last = step.table(TIER).page_table[:, -1]
        assert torch.equal(step.table(TIER).slot_mapping // 16, last.long())


@pytest.mark.parametrize("formats", [Formats("q4_0", "nvfp4"), Formats("bf16", "bf16")])
def test_a_pool_holds_what_the_codecs_make_of_the_rows(formats, monkeypatch):
    monkeypatch.setattr(data, "FILL_TOKENS", 20)  # chunks end inside pages
    pool = empty_pool(formats, SHAPE, 3, 16, "cpu")
    made = []
    real = data.random_rows

    def rows(*args):
        made.append(real(*args))
        return made[-1]

    monkeypatch.setattr(data, "random_rows", rows)
    fill(pool, SHAPE, "reference", generator())
    for cache, values in ((pool.k, torch.cat(made[::2])), (pool.v, torch.cat(made[1::2]))):
        assert values.shape == (48, 2, 64)
        assert float(values.float().std()) == pytest.approx(1, abs=0.05)
        expected = kvq_codecs.get(cache.spec.name).encode(values)
        for name, plane in cache.planes.items():
            wanted = expected.planes[name].view(torch.uint8)
            assert torch.equal(row_bytes(plane, torch.arange(48)), wanted)


def test_a_group_of_calls_reads_more_than_any_cache_holds(monkeypatch):
    free = 100 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, free))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    assert calls_for(1 << 30, "cuda") == data.MIN_CALLS
    assert calls_for(8 << 20, "cuda") == 64
    assert calls_for(1000, "cuda", most=64) == 64
    assert calls_for(30 << 30, "cuda") == 2  # as many as there is room for
    with pytest.raises(ValueError, match="no room for 90"):
        calls_for(90 << 30, "cuda")
