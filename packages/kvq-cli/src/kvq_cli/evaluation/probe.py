"""Keys that stand out, looked for before a model is served in a format that they may break.

A few sentences through the model: seconds at most. What a format costs a model is measured by
`kvq eval`; this finds what would ruin it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvq_cli.config import Formats, distinct
from kvq_cli.engine.cache import CacheChoice
from kvq_cli.evaluation.caches import FormatCache
from kvq_cli.evaluation.evidence import HARMFUL, RUINS
from kvq_cli.evaluation.metrics import Divergence
from kvq_cli.evaluation.stored import RowErrors
from kvq_cli.models.loader import LoadedModel

# Codec → the ratio max / median of mean |k| from which on a block's largest key hides others. q4_0:
# half a step is a 16th of the largest, so half the usual value reads back as 0 from 8 on; nvfp4: a
# 24th, 12. iso3 and iso4 turn four values together and look them up in tables that end at twice the
# root mean square of 128: half a spike, all that such a turn can spread, lies beyond from 4 on.
BREAKS_AT = {"iso3": 4.0, "iso4": 4.0, "q4_0": 8.0, "nvfp4": 12.0}

REFERENCE = "fp32"
TOKENS = 96
HOST_OPERATIONS = 4e11  # that a CPU may spend on one run: some seconds
FEWEST = 16
TEXT = (
    "The harbour of the old town lies on the north side of the bay, where two rivers meet the sea. "
    "Ships from eleven countries called there in 1904, and the warehouses along the quay held "
    "grain, timber, wool and salt. In winter the ice closes the inner basin for about six weeks; "
    "then the mail is carried over the hills by sledge, and the price of coal rises by a third. "
    "The council has voted to build a second breakwater of granite, 420 metres long, and to pay "
    "for it with a tax on every barrel that is landed."
)


def warnings(
    loaded: LoadedModel,
    formats: Formats,
    choose: Callable[[str], CacheChoice],
    *,
    chunk_tokens: int,
) -> tuple[str, ...]:
    """What is wrong with formats for a loaded model that attends through kvq.

    Parameters
    ----------
    choose : format → a cache that can be served; a ValueError says why there is none
    """
    suspects = {cache.k: BREAKS_AT[cache.k] for cache in distinct(formats) if cache.k in BREAKS_AT}
    if not suspects:
        return ()
    tokens = _tokens(loaded)
    ratio, layer, exact = _keys(loaded, choose(REFERENCE), tokens, chunk_tokens)
    if ratio < min(suspects.values()):
        return ()

    def cost(name: str) -> float:
        found = Divergence()
        logits = _logits(loaded, choose(name), tokens, chunk_tokens)
        found.add(logits[:-1], exact[:-1], torch.tensor(tokens[1:], device=logits.device))
        return float(found.summary()["kl_mean"])

    kl = cost(str(formats))
    if kl < HARMFUL:
        return ()
    harm = "ruins" if kl >= RUINS else "harms"
    return (
        f"keys of this model stand out (in layer {layer} the largest channel is {ratio:.3g} times "
        f"the median one), and {formats} {harm} it: mean KL {kl:.2g} to the fp32 cache on "
        f"{len(tokens)} tokens. {_safer(formats, cost)}; kvq eval measures it on a text of yours",
    )


def _safer(formats: Formats, cost: Callable[[str], float]) -> str:
    """Keys in 8 bits and values as asked, or else in 8 bits too; each is tried."""
    values = [cache.v for cache in distinct(formats)]
    tried = []
    for v in dict.fromkeys((*values, "q4_0", "q8_0")):
        name = "q8_0" if v == "q8_0" else f"k=q8_0,v={v}"
        try:
            kl = cost(name)
        except ValueError:  # not for these rows, or not served here
            continue
        tried.append((kl, name))
        if kl < HARMFUL:
            break
    if not tried:
        return "A format of more bits is safer"
    kl, name = min(tried)
    return f"Safer: {name}, {kl:.2g} there"


def _tokens(loaded: LoadedModel) -> list[int]:
    """The beginning of the text, shorter where the model is large and a CPU computes it."""
    most = TOKENS
    if loaded.model.device.type == "cpu":
        weights = sum(each.numel() for each in loaded.model.parameters())
        most = min(most, max(FEWEST, int(HOST_OPERATIONS / (2 * weights))))
    tokens: list[int] = loaded.tokenizer.encode(TEXT)
    return tokens[:most]


def _keys(
    loaded: LoadedModel, choice: CacheChoice, tokens: Sequence[int], chunk_tokens: int
) -> tuple[float, int, torch.Tensor]:
    """The largest outlier ratio, its layer, and the logits, over a cache that rounds nothing."""
    errors, logits = RowErrors({}), []
    for chunk in _cache(loaded, choice, tokens, chunk_tokens).forced(tokens):
        logits.append(chunk.logits)
        for layer in loaded.geometry.cached_layers:
            errors.add("k", layer, chunk.rows("k", layer))
    ratio, layer = max((ratio, layer) for layer, ratio in errors.outliers().items())
    return ratio, layer, torch.cat(logits)


def _logits(
    loaded: LoadedModel, choice: CacheChoice, tokens: Sequence[int], chunk_tokens: int
) -> torch.Tensor:
    cache = _cache(loaded, choice, tokens, chunk_tokens)
    return torch.cat([chunk.logits for chunk in cache.forced(tokens)])


def _cache(
    loaded: LoadedModel, choice: CacheChoice, tokens: Sequence[int], chunk_tokens: int
) -> FormatCache:
    return FormatCache(
        loaded.model,
        loaded.tokenizer,
        loaded.geometry,
        choice,
        chunk_tokens=min(chunk_tokens, len(tokens)),
        capacity=[len(tokens)],
    )
