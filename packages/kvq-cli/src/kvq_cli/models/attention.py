"""kvq's attention inside a transformers model.

transformers calls a registered function with the queries, keys and values of one layer, after
rotary embedding; extra keywords of the model call reach it. One model call holds the packed
tokens of all requests of a step: decodes first, then extends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from kvq_attention import Batch, ops
from kvq_attention.routes import Route
from kvq_attention.support import Choice
from kvq_cli.models import linear
from kvq_cli.models.linear import Part
from kvq_pools import Pool

IMPLEMENTATION = "kvq"


@dataclass(frozen=True, slots=True)
class StepContext:
    """What the layers of one model call need to know.

    Attributes
    ----------
    pool : where K and V live
    decode : the first requests of the packed tokens, one token each; None if there are none
    extend : the requests after them; None if there are none
    windows : sliding window of each layer, None = full attention
    backends : attention backend of each op
    prefill_reads : what an extend sees of its own chunk: "own" rows as they came, or "packed" ones
    scratch_bytes : that an extend of own rows may decode its past into
    extend_route : by which it reads its past, for measurements; None = as its backend chooses
    states : of linear-attention layers, by requests that are computed at once
    """

    pool: Pool
    decode: Batch | None
    extend: Batch | None
    windows: tuple[int | None, ...]
    backends: Choice
    prefill_reads: str = "own"
    scratch_bytes: int = ops.SCRATCH_BYTES
    extend_route: Route | None = None
    states: Sequence[Part] = ()

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        """One layer: q [T, Hq, D], k and v [T, Hkv, D] → [T, Hq, D].

        A decode stores its token first and reads everything packed. An extend reads its own
        chunk as it came and earlier tokens packed, and stores afterwards, so that a prefill
        never reads its own quantization; where it reads packed, it is a decode of several tokens
        by the backend of extends, and sees the same wherever the prompt is cut.
        """
        caches = self.pool.view("k", layer), self.pool.view("v", layer)
        tier = self.pool.plan.tier_of(layer).name
        split = self.decode.num_tokens if self.decode is not None else 0
        parts = []

        def store(rows: slice, batch: Batch) -> None:
            slots, told = batch.tables[tier].slot_mapping, self.backends.told("store")
            ops.store(k[rows], v[rows], *caches, slots, backend=told)

        def read(rows: slice, batch: Batch, op: str) -> None:
            given, told = (q[rows], *caches, batch, tier), self.backends.told(op)
            parts.append(ops.decode(*given, backend=told, **options))

        if self.decode is not None:
            store(slice(split), self.decode)
            read(slice(split), self.decode, "decode")
        if self.extend is not None:
            rows = slice(split, None)
            if self.prefill_reads == "packed":
                store(rows, self.extend)
                read(rows, self.extend, "extend")
            else:
                given = q[rows], k[rows], v[rows], *caches, self.extend, tier
                attended = ops.extend(
                    *given,
                    scratch_bytes=self.scratch_bytes,
                    backend=self.backends.told("extend"),
                    route=self.extend_route,
                    **options,
                )
                parts.append(attended)
                store(rows, self.extend)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    kvq_step: StepContext,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The function transformers calls: [1, H, T, D] in, [1, T, Hq, D] out."""
    layer = module.layer_idx
    window = kvq_step.windows[layer]
    if sliding_window != window:
        raise RuntimeError(
            f"layer {layer}: the model asks for a sliding window of {sliding_window}, the cache "
            f"was planned for {window}; this model's configuration is read wrongly"
        )
    options = {
        "scale": scaling if scaling is not None else query.shape[-1] ** -0.5,
        "window": window,
        "softcap": softcap,
        "sinks": s_aux,
    }
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return kvq_step.attend(layer, q, k, v, options).unsqueeze(0), None


def install(model: Any) -> None:
    """Make a loaded transformers model attend through kvq.

    No mask function is registered under the name, so transformers builds no mask: causality,
    windows and the boundaries between requests are the attention's own work.
    """
    AttentionInterface.register(IMPLEMENTATION, attention)
    model.set_attn_implementation(IMPLEMENTATION)
    linear.install(model)
