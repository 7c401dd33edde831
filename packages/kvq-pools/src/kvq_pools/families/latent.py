"""Families that store one latent row per token, which serves as key and as value."""

from __future__ import annotations

from collections.abc import Iterable

from kvq_codecs import Spec
from kvq_pools.errors import PlanError, whole_number
from kvq_pools.families.layers import Layout, check_index, check_layout, layer_ids, slabs
from kvq_pools.plan import PoolPlan, Slab, Tier


def mla(
    *,
    layers: Iterable[int],
    latent_dim: int,
    rope_dim: int,
    latent: Layout,
    page_tokens: int,
    model_layers: int | None = None,
) -> PoolPlan:
    """One row of latent_dim + rope_dim values per token in tier "full", slab "latent".

    The value of a token is the first latent_dim values of its row; all heads share the row, so
    every tensor-parallel rank stores it whole.

    Parameters
    ----------
    layers : global ids of the layers that have a paged cache
    latent_dim, rope_dim : values of the compressed row and of the rotated key after it
    latent : byte layout: one for all layers, or one for each layer id
    page_tokens : tokens of a page
    model_layers : layers of the whole model; an id from it on raises `PlanError`

    Raises `PlanError`, and `kvq_codecs.RowError` when a codec cannot store the row.
    """
    ids = layer_ids(layers, model_layers)
    return PoolPlan(page_tokens, (Tier("full", _rows(ids, latent_dim, rope_dim, latent)),))


def dsa(
    *,
    layers: Iterable[int],
    index_layers: Iterable[int],
    latent_dim: int,
    rope_dim: int,
    latent: Layout,
    index_dim: int,
    index: Spec,
    page_tokens: int,
    model_layers: int | None = None,
) -> PoolPlan:
    """`mla` and, in the same tier, an index key per token: slab "index_k".

    Parameters
    ----------
    index_layers : those of `layers` that run an indexer of their own; a layer that reuses
        another's selection stores no index rows
    index_dim : values of an index key
    index : bf16 or fp16
    others : as in `mla`

    Raises `PlanError`, `kvq_codecs.RowError`.
    """
    ids, indexed = layer_ids(layers, model_layers), layer_ids(index_layers, model_layers)
    if not indexed:
        raise PlanError("dsa needs index_layers; a model without any is an mla")
    others = [layer for layer in indexed if layer not in ids]
    if others:
        raise PlanError(f"index_layers {others} are not among the layers stored, {list(ids)}")
    check_index(index)
    index_k = Slab("index_k", index, indexed, 1, index_dim)
    rows = _rows(ids, latent_dim, rope_dim, latent)
    return PoolPlan(page_tokens, (Tier("full", (*rows, index_k)),))


def _rows(
    layers: tuple[int, ...], latent_dim: int, rope_dim: int, latent: Layout
) -> tuple[Slab, ...]:
    whole_number("latent_dim", latent_dim, 1, PlanError)
    whole_number("rope_dim", rope_dim, 0, PlanError)
    check_layout("latent", latent, layers)
    return slabs("latent", latent, layers, 1, latent_dim + rope_dim)
