"""A batch that contradicts itself is refused when it is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvq_attention import AttentionError, Batch, BatchError, Request, SlotError, Table, TensorError


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def table(rows: int = 2, tokens: int = 4, columns: int = 3) -> Table:
    return Table(
        torch.arange(rows * columns, dtype=torch.int32).view(rows, columns),
        torch.arange(tokens),
    )


def batch(**changes: Any) -> Batch:
    fields = {
        "query_offsets": int32(0, 1, 4),
        "seq_lens": int32(9, 3),
        "tables": {"full": table()},
        "page_tokens": 4,
    }
    return Batch(**{**fields, **changes})


def test_a_batch_knows_its_requests() -> None:
    good = batch()
    assert (good.num_requests, good.num_tokens) == (2, 4)
    assert good.requests() == [Request(0, 0, 1, 9), Request(1, 1, 4, 3)]
    assert [r.first_position for r in good.requests()] == [8, 0]


def test_rows_and_requests_may_be_padding() -> None:
    padded = batch(query_offsets=int32(0, 1, 2), seq_lens=int32(9, 0))
    assert padded.requests()[1] == Request(1, 1, 2, 0)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        (
            {"query_offsets": torch.tensor([0, 1, 4])},
            TensorError,
            "query_offsets must be a 1-d .*int32.*int64",
        ),
        ({"query_offsets": int32(0, 4)}, BatchError, "2 seq_lens need 3 query_offsets, got 2"),
        ({"query_offsets": int32(1, 1, 4)}, BatchError, "start at 0"),
        ({"query_offsets": int32(0, 1, 5)}, BatchError, "within the 4 tokens"),
        ({"query_offsets": int32(0, 3, 2)}, BatchError, "must not decrease: 2 follows 3"),
        ({"seq_lens": int32(9, 2)}, BatchError, "request 1 has 3 query tokens and seq_len 2"),
        ({"seq_lens": int32(-1, 3)}, BatchError, "request 0 has 1 query tokens and seq_len -1"),
        ({"seq_lens": int32(9, 3)[None]}, TensorError, "seq_lens must be a 1-d"),
        ({"seq_lens": [9, 3]}, TensorError, "seq_lens must be a torch tensor, got list"),
        ({"tables": {}}, BatchError, "at least one tier"),
        ({"tables": {"full": table(rows=3)}}, BatchError, "has 3 rows for 2 requests"),
        (
            {"tables": {"full": table(), "window": table(tokens=5)}},
            BatchError,
            "'window' has 5 tokens",
        ),
        ({"tables": None}, BatchError, "tables must map tier names to Tables, got NoneType"),
        ({"tables": [table()]}, BatchError, "tables must map tier names to Tables, got list"),
        ({"tables": {"t": 5}}, BatchError, r"tables\['t'\] must be a Table, got int"),
        (
            {"tables": {"full": table(), "window": None}},
            BatchError,
            r"tables\['window'\] must be a Table, got NoneType",
        ),
        ({"page_tokens": 0}, BatchError, "page_tokens must be an int of at least 1, got 0"),
        ({"page_tokens": 4.0}, BatchError, "page_tokens must be an int .*got 4.0"),
        ({"page_tokens": True}, BatchError, "page_tokens must be an int .*got True"),
        ({"page_tokens": None}, BatchError, "page_tokens must be an int .*got None"),
        ({"usual_requests": 0}, BatchError, "usual_requests must be None or an int .*got 0"),
        ({"usual_requests": True}, BatchError, "usual_requests must be None or an int .*got True"),
        ({"usual_requests": 8.0}, BatchError, "usual_requests must be None or an int .*got 8.0"),
    ],
)
def test_contradictions_are_refused(
    changes: dict[str, Any], error: type[AttentionError], said: str
) -> None:
    with pytest.raises(error, match=said):
        batch(**changes)


def test_a_table_has_fixed_types() -> None:
    with pytest.raises(TensorError, match=r"page_table must be a 2-d torch.int32"):
        Table(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(TensorError, match=r"slot_mapping must be a 1-d torch.int64"):
        Table(torch.zeros(2, 3, dtype=torch.int32), torch.zeros(4, dtype=torch.int32))


def test_an_unknown_tier_is_named_with_those_there_are() -> None:
    with pytest.raises(BatchError, match=r"no tier 'window'; it has \['full'\]"):
        batch().table("window")
    with pytest.raises(BatchError, match=r"no tier \['full'\]"):
        batch().table(["full"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("start", "stop", "pages"),
    [
        (0, 1, [0]),
        (0, 4, [0]),
        (0, 5, [0, 1]),
        (3, 5, [0, 1]),
        (4, 8, [1]),
        (7, 9, [1, 2]),
        (4, 4, []),
    ],
)
def test_pages_are_those_that_hold_the_positions(start: int, stop: int, pages: list[int]) -> None:
    good = batch()
    assert good.pages("full", good.requests()[0], start, stop, num_pages=6).tolist() == pages


def test_pages_are_checked() -> None:
    good = batch()
    request = good.requests()[1]  # pages 3, 4, 5
    with pytest.raises(SlotError, match=r"pages \[3, 4, 5\] must lie in \[0, 5\)"):
        good.pages("full", request, 0, 9, num_pages=5)
    with pytest.raises(SlotError, match=r"4 pages of 4 tokens are needed.* 3 columns"):
        good.pages("full", request, 0, 13, num_pages=6)


@pytest.mark.gpu
def test_a_batch_lies_on_one_device() -> None:
    with pytest.raises(AttentionError, match=r"seq_lens on cuda:0"):
        batch(seq_lens=int32(9, 3).cuda())
