"""What ncu prints of one call's kernels, as numbers; what is nothing of the kind is refused."""

from __future__ import annotations

import csv
import re
from collections import Counter
from math import isfinite
from pathlib import Path

Metrics = dict[tuple[str, str], list[tuple[str, str]]]  # (section, name) → (unit, value), each

MOST_STALLS = 3
GIGAHERTZ = {"Mhz": 1e-3, "Ghz": 1.0}
MICROSECONDS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
KERNEL = re.compile(r"^  (\S.*?) \(\d+, \d+, \d+\)x\(\d+, \d+, \d+\)", re.MULTILINE)
DETAILS = "give what `ncu --import REPORT --page details` printed"
SOURCE = "give what `ncu --import REPORT --page source --csv` printed"
ONE_CALL = "profile one call, as kvq_attention.bench.profiled makes it"


class Refused(ValueError):
    """Input that no record can be made of."""


def kernels(details: str) -> dict[str, str]:
    """The part of ncu's details page that is of each kernel, by name."""
    # text before the first, then a name and a text for each
    _, *parts = KERNEL.split(details)
    found: dict[str, str] = {}
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        if name in found:
            raise Refused(f"ncu's details have the kernel {name} several times; {ONE_CALL}")
        found[name] = text
    if "decode" not in found:
        raise Refused(f"ncu's details have no kernel of the name decode; {DETAILS}")
    return found


def metrics(text: str) -> Metrics:
    """The tables of one kernel's sections."""
    found: Metrics = {}
    section = ""
    for line in text.splitlines():
        if line.startswith("    Section: "):
            section = line.removeprefix("    Section: ").strip()
            continue
        parts = re.split(r" {2,}", line.strip())
        # a name, maybe its unit, a value; advice has no such columns
        if line.startswith("    ") and len(parts) in (2, 3) and not parts[0].startswith("---"):
            metric = parts[1] if len(parts) == 3 else "", parts[-1]
            found.setdefault((section, parts[0]), []).append(metric)
    return found


def number(found: Metrics, section: str, name: str) -> float:
    """A metric's value."""
    return _metric(found, section, name)[1]


def measured(found: Metrics, name: str, units: dict[str, float]) -> float:
    """A metric of the first section in one unit."""
    unit, value = _metric(found, "GPU Speed Of Light Throughput", name)
    if unit not in units:
        raise Refused(f"ncu's details have {name!r} in {unit!r}; units may be {', '.join(units)}")
    return value * units[unit]


def _metric(found: Metrics, section: str, name: str) -> tuple[str, float]:
    """A metric's unit and value."""
    values = found.get((section, name), [])
    if not values:
        raise Refused(f"ncu's details have no {name!r} under {section!r}; profile with --set full")
    if len(values) > 1:
        told = "; ".join(" ".join(reversed(each)).strip() for each in values)
        raise Refused(
            f"ncu's details have {name!r} under {section!r} several times ({told}); {ONE_CALL}"
        )
    ((unit, text),) = values
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        value = float("nan")
    if not isfinite(value):
        raise Refused(
            f"ncu's details have {text!r} as {name!r} under {section!r}, which must be a number; "
            "profile anew with --set full"
        )
    return unit, value


def stalls(source: str) -> str:
    """The reasons that most warps wait for, of the kernel decode in ncu's source page as CSV."""
    samples: Counter[str] = Counter()
    names: list[str] = []
    reasons: dict[int, str] = {}  # column → what it counts
    for number, fields in enumerate(csv.reader(source.splitlines()), 1):
        if fields[:1] == ["Kernel Name"]:
            names.append("".join(fields[1:2]))
        elif fields[:1] == ["Address"]:
            reasons = {
                column: name.removeprefix("stall_")
                for column, name in enumerate(fields)
                if name.startswith("stall_") and "(" not in name
            }
        elif fields and names[-1:] == ["decode"]:
            for column, reason in reasons.items():
                samples[reason] += _samples(fields[column : column + 1], number)
    if names.count("decode") != 1:
        times = "several times" if "decode" in names else "not"
        raise Refused(f"ncu's source page has the kernel decode {times}; {ONE_CALL}, and {SOURCE}")
    del samples["selected"]  # it was issuing
    total = samples.total()
    if not total:
        raise Refused(f"ncu's source page has no samples of decode's stalls; {SOURCE}")
    most = [(name, count) for name, count in samples.most_common(MOST_STALLS) if count]
    return ", ".join(f"{name} {count / total:.0%}" for name, count in most)


def _samples(cell: list[str], number: int) -> int:
    """Samples in one cell of a line; none at all where the line was cut off."""
    try:
        (text,) = cell
        return int(text.replace(",", "") or 0)
    except ValueError:
        raise Refused(
            f"line {number} of ncu's source page has no count in a column of stalls; {SOURCE}"
        ) from None


def read(path: Path) -> str:
    """A file's text, to its last line's end."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise Refused(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError:  # of ncu's own report, say
        raise Refused(f"{str(path)!r} is no text; give what ncu printed of its report") from None
    if not text.endswith("\n"):
        what = "is cut off in its last line" if text else "is empty"
        raise Refused(f"{str(path)!r} {what}; give all that was printed")
    return text
