"""What a row of a record holds: files are edited, merged and cut short before they are read."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from kvq_cli.quoting import in_json

# types stand for themselves; [x] is a list of x, (x,) one that is not empty
_NUMBER, _RATIO, _SIZE = "a number", "a number or null", "a number above 0"
_ERRORS = {"codec": str, "relative_error": _NUMBER, "mean_error": _NUMBER}
_ROW = {
    "format": str,
    "bytes_per_token": _SIZE,
    "perplexity": _NUMBER,
    "kl_mean": _NUMBER,
    "kl_99": _NUMBER,
    "kl_999": _NUMBER,
    "top1_agreement": _NUMBER,
    "greedy_tokens": (int,),
    "needles": [{"tokens": int, "depth": _NUMBER, "found": bool, "nll": _NUMBER}],
    "calls": [{"valid": bool, "right": bool}],
    "k_relative_error": _NUMBER,
    "v_relative_error": _NUMBER,
    "layers": ({"layer": int, "k_outlier_ratio": _RATIO, "k": _ERRORS, "v": _ERRORS},),
}
_NAMES = {str: "a name", int: "a whole number", bool: "true or false"}


def fault(rows: object) -> str | None:
    """The first thing in which rows are not as `kvq eval` writes them; None = there is none."""
    found = _fault(rows, [_ROW], "rows")
    if found is None and isinstance(rows, list):
        names = [row["format"] for row in rows]
        twice = next((name for name in names if names.count(name) > 1), None)
        found = f"rows has {twice} twice" if twice else None
    return found


def shown(value: object) -> str:
    """A value as its file has it; of what holds others, only what kind of thing it is."""
    if isinstance(value, Mapping):
        return "an object"
    return "a list" if isinstance(value, list | tuple) else in_json(value)


def _fault(value: object, wanted: Any, place: str) -> str | None:
    if isinstance(wanted, dict):
        return _object_fault(value, wanted, place)
    if isinstance(wanted, list | tuple):
        if not isinstance(value, list):
            return f"{place} is {shown(value)}, not a list"
        if not value and isinstance(wanted, tuple):
            return f"{place} is empty"
        faults = (_fault(each, wanted[0], f"{place}[{i}]") for i, each in enumerate(value))
        return next((each for each in faults if each is not None), None)
    if _fits(value, wanted):
        return None
    return f"{place} is {shown(value)}, not {_NAMES.get(wanted, wanted)}"


def _object_fault(value: object, wanted: Mapping[str, Any], place: str) -> str | None:
    if not isinstance(value, dict):
        return f"{place} is {shown(value)}, not an object"
    for key in wanted:
        if key not in value:
            return f"{place} has no {key}"
    for key in value:
        if key not in wanted:
            return f"{place} has {shown(key)}, which no version of the same number writes"
    faults = (_fault(value[key], each, f"{place}.{key}") for key, each in wanted.items())
    return next((each for each in faults if each is not None), None)


def _fits(value: object, wanted: Any) -> bool:
    if isinstance(value, bool):
        return wanted is bool
    if isinstance(value, str):  # terminals and files of UTF-8 take it
        return wanted is str and value.isprintable() and value != ""
    if value is None:
        return wanted is _RATIO
    if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        return False  # NaN is not at most anything
    if wanted is int:
        return isinstance(value, int)
    return wanted in (_NUMBER, _RATIO) or (wanted is _SIZE and value > 0)
