"""What tests of extend share: scenes whose caches lack the step's tokens, the call, the judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from kvq_attention import Batch, Table, ops

from .. import scene
from ..decode.cases import judge
from ..decode.places import SCORING, Place
from ..scene import TIER, Geometry, Scene

# Per request: nothing before the chunk; a page, a page and a token, most of a page before it.
LENGTHS, QUERIES = (5, 17, 23, 30, 53), (5, 1, 6, 15, 40)


def scene_of(
    place: Place, codec: str, v: str | None = None, *, seed: int = 0, **shape: Any
) -> Scene:
    """A scene whose step is not stored: its slots hold 0xFF bytes, as does what nobody owns."""
    given = {"lengths": LENGTHS, "queries": QUERIES, **shape}
    return scene.build(Geometry(codec, v, **given), place.device, stored_queries=False, seed=seed)


def extend(
    place: Place,
    built: Scene,
    *,
    batch: Batch | None = None,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    **scoring: Any,
) -> torch.Tensor:
    """The output for a scene's batch and rows (q, k, v), or for those given."""
    q, k, v = rows or (built.q, *built.fresh())
    scoring = {"scale": built.scale, **scoring}
    batch = batch or built.batch()
    out = ops.extend(q, k, v, *built.caches, batch, TIER, **scoring, backend=place.backend)
    assert out.dtype == q.dtype and out.shape == (*q.shape[:2], built.geometry.dims[1])
    return out


def check_output(built: Scene, out: torch.Tensor, **scoring: Any) -> None:
    """The output is float64 attention over the decoded past and the step's rows as they came."""
    judge(out, built.expected(fresh=True, **scoring), built.geometry.dtype)


def check(place: Place, codec: str, v: str | None = None, *, seed: int = 0, **given: Any) -> None:
    """Extend in a scene and judge the output; given: its shape, and the scoring."""
    shape = {name: given.pop(name) for name in list(given) if name not in SCORING}
    built = scene_of(place, codec, v, seed=seed, **shape)
    check_output(built, extend(place, built, **given), **given)


def company(
    built: Scene, requests: Sequence[int], spare_columns: int = 0
) -> tuple[Batch, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The batch and rows (q, k, v) of some of a scene's requests, in this order."""
    whole, counts = built.batch(), built.geometry.counts
    table = whole.tables[TIER]
    device = built.q.device
    wide = torch.full((len(requests), spare_columns), -1, dtype=torch.int32, device=device)

    def of(rows: torch.Tensor) -> torch.Tensor:
        parts = rows.split(counts)
        return torch.cat([parts[r] for r in requests])

    batch = Batch(
        torch.tensor([0, *(counts[r] for r in requests)], device=device).cumsum(0).int(),
        whole.seq_lens[list(requests)],
        {
            TIER: Table(
                torch.cat([table.page_table[list(requests)], wide], dim=1), of(table.slot_mapping)
            )
        },
        whole.page_tokens,
    )
    k, v = built.fresh()
    return batch, (of(built.q), of(k), of(v))


def cut(built: Scene, start: int) -> Scene:
    """The only request of a scene with its queries from `start` on as the step."""
    (length,), (count,) = built.geometry.lengths, built.geometry.counts
    shape = replace(built.geometry, queries=(length - start,))
    return replace(built, geometry=shape, qs=[built.qs[0][start - length + count :]])


def piece(built: Scene, start: int, stop: int) -> Scene:
    """The only request of a scene whose step is all of it, when tokens [start, stop) are."""
    shape = replace(built.geometry, lengths=(stop,), queries=(stop - start,))
    k, v, q = (rows[0] for rows in (built.ks, built.vs, built.qs))
    return replace(built, geometry=shape, ks=[k[:stop]], vs=[v[:stop]], qs=[q[start:stop]])
