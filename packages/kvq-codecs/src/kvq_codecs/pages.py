"""The reference pages of the formats, generated: `python -m kvq_codecs.pages DIRECTORY`.

What a page says in words is the docstring of `formats/<codec>.py`; its figures come from the
spec, its code values from the module's `CODE_VALUES`, its errors from `measure`.
"""

from __future__ import annotations

import argparse
import math
from importlib import import_module
from pathlib import Path
from typing import Any

from kvq_codecs.measure import DIM, NUM_ROWS, gaussian_rows, kurtotic_rows, measure
from kvq_codecs.registry import BUILT_IN, get
from kvq_codecs.spec import Spec
from kvq_codecs.table import HEAD_DIMS, figure, grid, mean_figure, render, row_bytes, rows


def pages() -> dict[str, str]:
    """File name → text, for the index and every built-in codec."""
    return {"index.md": index(), **{f"{name}.md": page(name) for name in BUILT_IN}}


def index() -> str:
    """The page that compares the formats."""
    links = "".join(f"- [{name}]({name}.md): {_words(name)[0]}\n" for name in BUILT_IN)
    return (
        "# Formats\n\n"
        f"{render([row for row in rows() if row.name in BUILT_IN])}\n"
        "Bits per value count the scales, at head_dim 128; bytes are those of a stored row;\n"
        "a dash marks what the format refuses. Errors are in units of the rows' root mean square,\n"
        f"on {NUM_ROWS} Gaussian rows of {DIM} values; ± is the standard error of the mean.\n\n"
        f"{links}"
    )


def page(name: str) -> str:
    """The page of one built-in codec."""
    spec, (summary, words) = get(name).spec, _words(name)
    values = getattr(_module(name), "CODE_VALUES", None)
    sections = [
        f"# {name}\n\n{summary[0].upper()}{summary[1:]}\n\n{words}\n",
        f"## Planes\n\n{_planes(spec)}",
        f"## Sizes\n\n{_sizes(spec)}",
        f"## Interchange bytes\n\n{_interchange(spec)}",
        f"## Measured error\n\n{_measured(name)}",
    ]
    if values is not None:
        sections.insert(3, f"## Code values\n\n{_code_values(values)}")
    return "\n".join(sections)


def _module(name: str) -> Any:
    return import_module(f"kvq_codecs.formats.{name}")


def _words(name: str) -> tuple[str, str]:
    """Summary and body of the format's docstring."""
    summary, _, body = (_module(name).__doc__ or "").partition("\n\n")
    return summary.removeprefix(f"{name}: "), body.strip()


def _planes(spec: Spec) -> str:
    divisor = f"D must be a multiple of {spec.divisor}." if spec.divisor > 1 else "D may be any."
    lines = [
        [
            f"`{p.name}`",
            p.dtype,
            str(p.items) if p.span is None else _ratio(p.items, p.span),
        ]
        for p in spec.planes
    ]
    return (
        f"Rows of D values; {divisor} Defined by: {spec.source}.\n\n"
        f"{grid([['plane', 'dtype', 'items per row'], *lines])}"
    )


def _ratio(items: int, span: int) -> str:
    shared = math.gcd(items, span)
    times, over = items // shared, span // shared
    return (f"{times} · D" if times > 1 else "D") + (f" / {over}" if over > 1 else "")


def _sizes(spec: Spec) -> str:
    lines = [["head_dim", "stored bytes", "bits per value", "interchange bytes"]]
    for dim in HEAD_DIMS:
        size = row_bytes(spec, dim)
        cells = ["-"] * 3 if size is None else [str(size), f"{8 * size / dim:g}"]
        lines.append([str(dim), *cells, *([] if size is None else [str(spec.block_bytes(dim))])])
    return grid(lines)


def _interchange(spec: Spec) -> str:
    if spec.interchange is None:
        names = ", then ".join(f"`{p.name}`" for p in spec.planes)
        return f"The planes in order over the whole row: {names}.\n"
    lines, start = [["bytes", "field"]], 0
    for name, size in spec.fields(spec.divisor):
        field = "dead: written 0, ignored on reading" if name is None else f"`{name}`"
        lines.append([f"{start} … {start + size - 1}", field])
        start += size
    return f"D / {spec.divisor} blocks of {start} bytes, each:\n\n{grid(lines)}"


def _measured(name: str) -> str:
    lines = [["rows", "relative rms", "relative MSE", "mean error"]]
    kinds = {"Gaussian": gaussian_rows(), "Student t, 3 degrees of freedom": kurtotic_rows()}
    for kind, given in kinds.items():
        error = measure(get(name), given)
        lines.append(
            [kind, figure(error.relative_rms), figure(error.relative_mse), mean_figure(error)]
        )
    return (
        f"On {NUM_ROWS} rows of {DIM} values, in units of the rows' root mean square;\n"
        "± is the standard error of the mean.\n\n"
        f"{grid(lines)}"
    )


def _code_values(values: Any) -> str:
    columns = 8
    lines = [["code", *(f"+{i}" for i in range(columns))]]
    for start in range(0, len(values), columns):
        part = [_number(float(v)) for v in values[start : start + columns]]
        lines.append([f"`0x{start:02X}`", *part])
    return f"Before scaling:\n\n{grid(lines)}"


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else f"{value:.9g}"


def main() -> None:
    """Write every page into a directory."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    directory: Path = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    for file_name, text in pages().items():
        (directory / file_name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
