"""Free pages may hold anything."""

from __future__ import annotations

import numpy as np
import pytest
from space_world import World, plan_of


@pytest.mark.parametrize("fill", [0x7F, 0xFF])
@pytest.mark.parametrize("codec", ["fp32", "q8_0", "nvfp4", "fp8_e4m3"])
@pytest.mark.parametrize("family", ["mha", "hybrid_swa", "all_window", "qsa"])
def test_p140_poison_in_free_pages_never_changes_what_is_read(
    family: str, codec: str, fill: int
) -> None:
    """Stale memory: after each operation free pages are these bytes, with scales of NaN.

    `World.check` fills them, decodes all that each running sequence sees, and compares.
    """
    plan = plan_of(family, 4, codec=codec, dim=32, window_pages=7, max_requests=3)
    world, rng = World(plan, 10, fill=fill), np.random.default_rng(1)
    said, sizes, hits = [[0]], iter([7, 14, 9, 10]), 0
    for step in range(60):
        old = said[rng.integers(max(0, len(said) - 4), len(said))]
        cut = rng.integers(0, 8) if len(old) < 24 else 20
        tokens = [*old[: len(old) - cut], *rng.integers(0, 3, rng.integers(1, 12)).tolist()]
        if len(world.live) < 3 and world.space.can_open(len(tokens), 5, world.space.lookup(tokens)):
            hits += world.open(tokens).num_cached
            said.append(tokens)
        world.check()
        for sequence in list(world.live):
            goal = min(len(world.live[sequence]), sequence.num_computed + 5)
            if goal > sequence.num_computed and world.space.can_grow(sequence, goal):
                world.compute(sequence, goal - sequence.num_computed)
            elif rng.integers(2):
                world.close(sequence)
            world.check()
        if step % 20 == 10:
            world.rebuild(next(sizes), running=list(world.live))
            world.check()
    assert hits > 50 and world.space.stats().evicted_pages > 10
    world.poison()
    filled = [p for tier in plan.tiers for p in planes(world, tier.slabs[0].name)]
    assert all(np.all(p[-1].view(np.uint8) == fill) for p in filled if p.dtype == np.uint8)
    assert all(np.all(np.isnan(p[-1])) for p in filled if p.dtype.kind == "f")


def planes(world: World, slab: str) -> list[np.ndarray]:
    """The planes of a slab's first layer; their last page is padding, which nobody owns."""
    layer = next(s.layers[0] for t in world.pool.plan.tiers for s in t.slabs if s.name == slab)
    return list(world.pool.view(slab, layer).planes.values())
