"""The formats that `--kv-cache-dtype auto` goes down, from the most exact to the smallest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvq_cli.config import CacheFormatError, parse_cache_dtype
from kvq_cli.evaluation.evidence import HARMFUL, RUINS, Evidence

# Each errs more and takes less than the one before; a test holds them to it.
LADDER = (
    *("q8_0", "k=q8_0,v=q6_0", "q6_0", "k=q6_0,v=q4_0"),
    *("q4_0", "iso4", "iso3"),
)
DEFAULT = "q8_0"  # where nobody asked for a context: without evidence no rung below it is taken
_CODECS = ("q8_0", "q6_0", "q4_0", "iso4", "iso3")  # of the ladder, in its order


@dataclass(frozen=True, slots=True)
class Rung:
    """A format of less than 16 bits, and what a cache of the asked context takes in it.

    Attributes
    ----------
    kl : mean KL to the fp32 cache; of one that was not measured the least to be expected
    """

    name: str
    nbytes: int
    kl: float
    measured: bool


def rung(name: str, nbytes: int, evidence: Evidence | None) -> Rung:
    """A format with what evidence says of it.

    One that was not measured is no better than a measured one that has as many bits or more for
    keys and for values, of codecs whose order is known.
    """
    row = None if evidence is None else evidence[name]
    if row is not None:
        return Rung(name, nbytes, row.kl, measured=True)
    rows = () if evidence is None else evidence.rows
    least = max((row.kl for row in rows if _finer(row.format, name)), default=0.0)
    return Rung(name, nbytes, least, measured=False)


def ordered(rungs: Iterable[Rung]) -> list[Rung]:
    """Those that may be taken, each of fewer bytes than all before it.

    One that was not measured stands before what takes fewer bytes and behind what takes more. None
    is kept beside a measured one that is nearer to fp32 at no more bytes; none that ruins the model
    or must be expected to.
    """
    borne = [each for each in rungs if each.kl < RUINS]
    known = [each for each in borne if each.measured]
    found: list[Rung] = []
    # of as many bytes the measured one is taken, unless it harms the model
    for each in sorted(borne, key=lambda r: (-r.nbytes, r.kl >= HARMFUL, not r.measured, r.kl)):
        beaten = any(other.kl < each.kl and other.nbytes <= each.nbytes for other in known)
        if not beaten and (not found or each.nbytes < found[-1].nbytes):
            found.append(each)
    return found


def _finer(measured: str, name: str) -> bool:
    """Whether a format is known to lose no more than another: as much or more on either side."""
    first, second = _ranks(measured), _ranks(name)
    if first is None or second is None:
        return False
    return first[0] <= second[0] and first[1] <= second[1]


def _ranks(name: str) -> tuple[int, int] | None:
    """Places of a format's codecs for keys and values in the ladder's order; None = of others."""
    try:
        cache = parse_cache_dtype(name)
        return _CODECS.index(cache.k), _CODECS.index(cache.v)
    except (CacheFormatError, ValueError):
        return None
