"""What the families share: layer ids, layouts by layer, heads of a rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import kvq_codecs
from kvq_codecs import Spec
from kvq_pools.errors import PlanError, whole_number
from kvq_pools.plan import Slab

# One layout for all layers, or one for each global layer id.
Layout = Spec | Mapping[int, Spec]


def heads_per_rank(kv_heads: int, ranks: int) -> int:
    """KV heads that one of `ranks` tensor-parallel ranks stores.

    Heads are divided; where there are fewer than ranks, each is replicated on as many ranks as
    share it. `PlanError` when neither number divides the other.
    """
    whole_number("kv_heads", kv_heads, 1, PlanError)
    whole_number("ranks", ranks, 1, PlanError)
    if kv_heads % ranks == 0:
        return kv_heads // ranks
    if ranks % kv_heads == 0:
        return 1
    raise PlanError(
        f"{kv_heads} KV heads can neither be divided among {ranks} ranks nor replicated on them; "
        f"take a number of ranks that divides {kv_heads} or is a multiple of it"
    )


def layer_ids(layers: Iterable[int], model_layers: int | None) -> tuple[int, ...]:
    """`layers` as a tuple; `PlanError` for what is no layer id or beyond the model."""
    if not isinstance(layers, Iterable):
        raise PlanError(f"layers must be global layer ids, several of them, got {layers!r}")
    ids = tuple(whole_number("a layer id", layer, 0, PlanError) for layer in layers)
    if model_layers is not None:
        whole_number("model_layers", model_layers, 1, PlanError)
        beyond = [layer for layer in ids if layer >= model_layers]
        if beyond:
            raise PlanError(
                f"layers {beyond} are beyond a model of {model_layers} layers "
                f"(0 … {model_layers - 1})"
            )
    return ids


def check_layout(name: str, layout: Layout, layers: tuple[int, ...]) -> None:
    """`PlanError` unless a layout by layer names exactly the layers that store `name`."""
    if not isinstance(layout, Mapping):
        return
    missing = [layer for layer in layers if layer not in layout]
    others = [layer for layer in layout if layer not in layers]
    if missing or others:
        raise PlanError(
            f"a layout by layer must name the layers that store {name!r}, {list(layers)}, and no "
            f"others; missing: {missing}, without a cache: {others}"
        )


def slabs(
    name: str, layout: Layout, layers: tuple[int, ...], heads: int, dim: int
) -> tuple[Slab, ...]:
    """One slab for the layers of each layout."""
    if not isinstance(layout, Mapping):
        return (Slab(name, layout, layers, heads, dim),)
    groups: list[tuple[Spec, list[int]]] = []
    for layer in layers:
        spec = layout[layer]
        same = next((ids for known, ids in groups if known == spec), None)
        if same is None:
            groups.append((spec, [layer]))
        else:
            same.append(layer)
    return tuple(Slab(name, spec, tuple(ids), heads, dim) for spec, ids in groups)


def check_index(index: object) -> None:
    """`PlanError` unless index keys keep 16 bits: what is selected must not depend on a codec."""
    allowed = [kvq_codecs.get(name).spec for name in ("bf16", "fp16")]
    if index not in allowed:
        given = index.name if isinstance(index, Spec) else repr(index)
        raise PlanError(
            f"index must be the spec of {' or '.join(s.name for s in allowed)}, got {given}; "
            "index keys are never quantized"
        )
