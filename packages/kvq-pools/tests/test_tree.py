"""What the tree does costs what it changes, not what there is."""

from __future__ import annotations

from typing import Any

import pytest
from space_world import plan_of

from kvq_pools import CacheSpace, sequences
from kvq_pools.nodes import Root, token_bytes


class Counted(bytes):
    """Bytes that count how many of them slices have copied."""

    copied = 0

    def __getitem__(self, key: Any) -> Any:
        part = Counted(super().__getitem__(key))
        Counted.copied += len(part)
        return part

    def __radd__(self, other: bytes) -> Counted:
        return Counted(other + bytes(self))


@pytest.mark.parametrize("page_tokens", [1, 2, 16])
def test_tokens_are_copied_once_however_many_a_step_has(
    page_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequences, "token_bytes", lambda tokens: Counted(token_bytes(tokens)))
    for pages in (8, 64, 512):
        count = pages * page_tokens + page_tokens // 2
        space = CacheSpace(plan_of("mha", page_tokens), pages + 1, prefix_cache=True)
        sequence = space.open()
        sequence.grow(count)
        monkeypatch.setattr(Counted, "copied", 0)
        sequence.advance(count, list(range(count)))
        assert Counted.copied <= 4 * count + 16 * pages  # and a page's first token now and then
        assert space.num_cached("full") == pages
        space.check_integrity()


class Unwalked(dict[str, Root]):
    """A dict that nobody may walk through."""

    def __iter__(self) -> Any:
        raise AssertionError("all adapters were looked at")

    keys = values = items = __iter__


def test_an_eviction_looks_at_one_adapter_however_many_there_are() -> None:
    space = CacheSpace(plan_of("mha", 2), 6, prefix_cache=True)
    for number in range(6):
        sequence = space.open((), f"adapter {number}")
        sequence.grow(2)
        sequence.advance(2, [1, 2])
        sequence.close()
    tree = space._tree
    roots = tree.roots = Unwalked(tree.roots)
    greedy = space.open()
    greedy.grow(8)
    assert tree.roots is roots
    assert len(roots) == 2
    tree.roots = {name: roots[name] for name in ("adapter 4", "adapter 5")}
    space.check_integrity()
