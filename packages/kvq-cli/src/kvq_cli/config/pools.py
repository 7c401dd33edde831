"""The one place where a model and its formats become a plan of the pool."""

from __future__ import annotations

from collections.abc import Callable

import kvq_codecs
from kvq_cli.config.formats import CacheFormat, Formats, check_format
from kvq_cli.config.geometry import ModelGeometry
from kvq_pools import (
    Layout,
    PoolPlan,
    dsa,
    heads_per_rank,
    hybrid_swa,
    mha,
    mla,
    pages_for_tokens,
    qsa,
    window_pages_per_request,
)


def build_plan(
    model: ModelGeometry,
    formats: Formats,
    *,
    page_tokens: int,
    max_running_requests: int,
    max_prefill_tokens: int,
    ranks: int = 1,
) -> PoolPlan:
    """What one rank's pool of a model stores and costs.

    Parameters
    ----------
    formats : one for all layers, or one for each cached layer
    page_tokens : tokens of a page
    max_running_requests : requests that run at once: a window tier holds the windows of as many
    max_prefill_tokens : most prompt tokens computed in a step
    ranks : tensor-parallel; heads are divided among them, latent rows and index keys are not

    Raises
    ------
    CacheFormatError : a codec that cannot store the model's rows
    kvq_pools.PlanError : heads that the ranks cannot share, a page that cuts an index group
    """
    check_format(model, formats)
    k = _layout(model, formats, lambda cache: cache.k)
    v = _layout(model, formats, lambda cache: cache.v)
    layers = {"model_layers": model.num_layers, "page_tokens": page_tokens}
    index = kvq_codecs.get(model.index.codec).spec if model.index is not None else None
    if model.latent is not None:
        rows = {"latent_dim": model.latent.dim, "rope_dim": model.latent.rope_dim}
        if model.index is None or index is None:
            return mla(layers=model.cached_layers, latent=k, **rows, **layers)
        return dsa(
            layers=model.cached_layers,
            index_layers=model.index.layers,
            index_dim=model.index.dim,
            index=index,
            latent=k,
            **rows,
            **layers,
        )
    heads = heads_per_rank(model.num_kv_heads, ranks)
    if model.index is not None and index is not None:
        return qsa(
            layers=model.cached_layers,
            kv_heads=heads,
            head_dim=model.head_dim,
            k=k,
            v=v,
            index=index,
            index_dim=model.index.dim,
            ratio=model.index.ratio,
            max_requests=max_running_requests,
            max_step_tokens=max_running_requests + max_prefill_tokens,
            **layers,
        )
    if model.window is None:
        return mha(
            layers=model.cached_layers, kv_heads=heads, head_dim=model.head_dim, k=k, v=v, **layers
        )
    per_request = window_pages_per_request(model.window, max_prefill_tokens, page_tokens)
    return hybrid_swa(
        full_layers=model.full_layers,
        window_layers=model.window_layers,
        window=model.window,
        # without full layers the window tier is the one that grows
        window_pages=per_request * max_running_requests if model.full_layers else None,
        kv_heads=heads,
        head_dim=model.head_dim,
        window_kv_heads=heads_per_rank(model.window_kv_heads or model.num_kv_heads, ranks),
        window_head_dim=model.window_head_dim,
        k=k,
        v=v,
        **layers,
    )


def pages_per_request(
    model: ModelGeometry, num_tokens: int, *, page_tokens: int, max_prefill_tokens: int
) -> int:
    """Most growing pages that a request of `num_tokens` holds at once.

    That is all of its tokens' pages, or in a model whose every layer slides those of the window.
    """
    pages = pages_for_tokens(num_tokens, page_tokens)
    if model.window is None or model.full_layers:
        return pages
    return min(pages, window_pages_per_request(model.window, max_prefill_tokens, page_tokens))


def _layout(model: ModelGeometry, formats: Formats, side: Callable[[CacheFormat], str]) -> Layout:
    if isinstance(formats, CacheFormat):
        return kvq_codecs.get(side(formats)).spec
    return {
        layer: kvq_codecs.get(side(formats.layers[layer])).spec for layer in model.cached_layers
    }
