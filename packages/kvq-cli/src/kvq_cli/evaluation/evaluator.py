"""Runs formats over a text, one after another, beside the cache that rounds nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvq_cli.config import CacheFormat, Formats, ModelGeometry
from kvq_cli.engine.cache import CacheChoice
from kvq_cli.evaluation import heads
from kvq_cli.evaluation.caches import FormatCache
from kvq_cli.evaluation.material import Material
from kvq_cli.evaluation.metrics import (
    Divergence,
    NotFiniteError,
    agreeing_tokens,
    answer_nll,
    is_finite,
    rounded,
)
from kvq_cli.evaluation.stored import RowErrors

REFERENCE = "fp32"
SIDES = ("k", "v")

Progress = Callable[[str, int, int], None]  # description, tokens done, tokens in all


@dataclass(frozen=True, slots=True)
class Reference:
    """What a model makes of the material over the cache that rounds nothing.

    Attributes
    ----------
    hidden : last hidden states of each window [tokens, hidden]
    continuations : of the prompts, by greedy decoding
    errors : of codecs on its keys and values
    divergence : from itself, with the text's perplexity
    """

    hidden: list[torch.Tensor]
    continuations: list[list[int]]
    errors: RowErrors
    divergence: Divergence


class Evaluator:
    """A loaded model that attends through kvq, and what its formats are tried on.

    Parameters
    ----------
    choose : format → a cache that can be served; a ValueError says why there is none
    tell : hears of progress
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        shape: ModelGeometry,
        material: Material,
        choose: Callable[[str], CacheChoice],
        *,
        chunk_tokens: int,
        tell: Progress = lambda *_: None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.shape = shape
        self.material = material
        self.choose = choose
        self.chunk_tokens = chunk_tokens
        self.tell = tell

    def run(
        self, formats: Sequence[Formats], finished: Collection[str] = ()
    ) -> Iterator[dict[str, Any]]:
        """A row for each format as soon as it is measured, the reference's first.

        Formats in `finished` are left out; where nothing is left, nothing is computed.
        """
        plain = CacheFormat(REFERENCE, REFERENCE)
        wanted = {str(each): each for each in (plain, *formats)}
        left = {name: each for name, each in wanted.items() if name not in finished}
        if not left:
            return
        reference = self._refer(list(left.values()))
        for name, each in left.items():
            yield self._row(name, each, reference)

    def _refer(self, formats: Sequence[Formats]) -> Reference:
        """Compute the reference, and what the formats' codecs make of its rows."""
        codecs = {
            side: sorted({REFERENCE, *(c for f in formats for c in self._codecs(f, side).values())})
            for side in SIDES
        }
        total = sum(map(len, (*self.material.windows, *self.material.prompts)))
        told = _Told(self.tell, "what the model itself predicts", total)
        errors, divergence, hidden = RowErrors(codecs), Divergence(), []
        cache = self._cache(REFERENCE)
        for window in self.material.windows:
            with heads.watched(self.model) as seen:
                for chunk in cache.forced(window):
                    self._check(REFERENCE, chunk.logits)
                    _compare(divergence, chunk.logits, chunk.logits, window[chunk.start + 1 :])
                    for layer in self.shape.cached_layers:
                        for side in SIDES:
                            errors.add(side, layer, chunk.rows(side, layer))
                    told.more(chunk.stop - chunk.start)
            hidden.append(torch.cat(seen))
        continuations = cache.greedy(self.material.prompts, self.material.new_tokens)
        told.all()
        return Reference(hidden, continuations, errors, divergence)

    def _row(self, name: str, formats: Formats, reference: Reference) -> dict[str, Any]:
        """All that is measured of one format."""
        told = _Told(self.tell, name, self.material.num_tokens)
        cache = self._cache(name)
        if name == REFERENCE:
            divergence = reference.divergence
        else:
            divergence = self._diverge(name, cache, reference, told)
        agreeing = []
        for prompt, tokens in zip(self.material.prompts, reference.continuations, strict=True):
            logits = self._check(name, cache.tail([*prompt, *tokens], len(tokens)))
            agreeing.append(agreeing_tokens(logits, self._tensor(tokens)))
            told.more(len(prompt) + len(tokens))
        needles = []
        for needle in self.material.needles:
            answer = needle.tokens[-needle.answer_tokens :]
            logits = self._check(name, cache.tail(needle.tokens, len(answer)))
            found, nll = answer_nll(logits, self._tensor(answer))
            place = {"tokens": len(needle.tokens), "depth": needle.depth}
            needles.append({**place, "found": found, "nll": rounded(nll)})
            told.more(len(needle.tokens))
        calls = self._calls(cache)
        told.all()
        row = {
            "format": name,
            "bytes_per_token": sum(cache.pool.plan.token_bytes_by_tier.values()),
            **divergence.summary(),
            "greedy_tokens": agreeing,
            "needles": needles,
            "calls": calls,
            **self._errors(formats, reference.errors),
        }
        if not _all_finite(row):  # a token of the text that has no probability at all, or the like
            raise self._not_finite(name, "figures")
        return row

    def _check(self, name: str, logits: torch.Tensor) -> torch.Tensor:
        """The logits, which are predictions; NotFiniteError where they are not."""
        if not is_finite(logits):
            raise self._not_finite(name, "logits")
        return logits

    def _not_finite(self, name: str, what: str) -> NotFiniteError:
        if name == REFERENCE:
            return NotFiniteError(
                f"the {what} of the model itself, over a cache in {name}, are not finite: no "
                f"format can be compared with it. Its weights are damaged, or "
                f"{str(self.model.dtype).removeprefix('torch.')} is too narrow for them (--dtype)"
            )
        return NotFiniteError(
            f"over a cache in {name} the model's {what} are not finite, over one in {REFERENCE} "
            "they are: it cannot be served in this format. What was measured before it is kept; "
            "name the formats to go on with in --kv-cache-dtype"
        )

    def _diverge(
        self, name: str, cache: FormatCache, reference: Reference, told: _Told
    ) -> Divergence:
        found = Divergence()
        for window, hidden in zip(self.material.windows, reference.hidden, strict=True):
            for chunk in cache.forced(window):
                self._check(name, chunk.logits)
                exact = heads.logits(self.model, hidden[chunk.start : chunk.stop])
                _compare(found, chunk.logits, exact, window[chunk.start + 1 :])
                told.more(chunk.stop - chunk.start)
        return found

    def _calls(self, cache: FormatCache) -> list[dict[str, bool]]:
        """The model's own answers, each fed with what it said before."""
        asked = self.material.calls
        if not asked:
            return []
        answers = cache.greedy([call.prompt for call in asked], self.material.call_tokens)
        return [
            call.grade(self.tokenizer.decode(tokens, skip_special_tokens=True))
            for call, tokens in zip(asked, answers, strict=True)
        ]

    def _errors(self, formats: Formats, errors: RowErrors) -> dict[str, Any]:
        """Of each layer in its own codecs, and of all."""
        by_side = {side: self._codecs(formats, side) for side in SIDES}
        outliers = errors.outliers()
        layers = [
            {
                "layer": layer,
                # none where a head's median channel is 0
                "k_outlier_ratio": outliers[layer] if math.isfinite(outliers[layer]) else None,
                **{side: errors.layer(side, layer, by_side[side][layer]) for side in SIDES},
            }
            for layer in self.shape.cached_layers
        ]
        total = {f"{side}_relative_error": errors.total(side, by_side[side]) for side in SIDES}
        return {**total, "layers": layers}

    def _codecs(self, formats: Formats, side: str) -> Mapping[int, str]:
        """Cached layer → codec of its keys or values."""
        return {
            layer: getattr(
                formats if isinstance(formats, CacheFormat) else formats.layers[layer], side
            )
            for layer in self.shape.cached_layers
        }

    def _cache(self, name: str) -> FormatCache:
        return FormatCache(
            self.model,
            self.tokenizer,
            self.shape,
            self.choose(name),
            chunk_tokens=self.chunk_tokens,
            capacity=self.material.capacity,
        )

    def _tensor(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor(tokens, device=self.model.device)


class _Told:
    """Progress of one format."""

    def __init__(self, tell: Progress, name: str, total: int) -> None:
        self._tell, self._name, self._total, self._done = tell, name, total, 0
        tell(name, 0, total)

    def more(self, tokens: int) -> None:
        self._done += tokens
        self._tell(self._name, self._done, self._total)

    def all(self) -> None:
        self._tell(self._name, self._total, self._total)


def _all_finite(figures: Any) -> bool:
    if isinstance(figures, Mapping | list):
        inner = figures.values() if isinstance(figures, Mapping) else figures
        return all(map(_all_finite, inner))
    return not isinstance(figures, float) or math.isfinite(figures)


def _compare(
    found: Divergence, logits: torch.Tensor, exact: torch.Tensor, following: Sequence[int]
) -> None:
    """Add the predictions of tokens that the text has: a window's last one has no successor."""
    targets = torch.tensor(following[: len(logits)], device=logits.device)
    count = len(targets)
    if count:
        found.add(logits[:count], exact[:count], targets)
