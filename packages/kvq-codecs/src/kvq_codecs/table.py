"""The table of formats: what each costs and how exact it is."""

from __future__ import annotations

from dataclasses import dataclass

from kvq_codecs.errors import RowError
from kvq_codecs.measure import DIM, Measured, gaussian_rows, measure
from kvq_codecs.registry import get, names
from kvq_codecs.spec import Spec

HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True, slots=True)
class FormatRow:
    """One codec.

    Attributes
    ----------
    name : registry name
    bits_per_value : scales included, at head_dim 128
    block : values under one scale, in words
    row_bytes : bytes of a stored row at each of `HEAD_DIMS`; None where the codec refuses it
    error : on Gaussian rows
    """

    name: str
    bits_per_value: float
    block: str
    row_bytes: tuple[int | None, ...]
    error: Measured


def rows() -> list[FormatRow]:
    """A row for every registered codec; measures each (all of them take under a second)."""
    gaussian = gaussian_rows()
    return [
        FormatRow(
            name=name,
            bits_per_value=8 * get(name).spec.row_bytes(DIM) / DIM,
            block=block(get(name).spec),
            row_bytes=tuple(row_bytes(get(name).spec, dim) for dim in HEAD_DIMS),
            error=measure(get(name), gaussian),
        )
        for name in names()
    ]


def block(spec: Spec) -> str:
    """How many values share a scale: '32', 'row', '16, row', or '-' where none do."""
    shared = [str(p.span) for p in spec.planes if p.span is not None and p.span > p.items * 8]
    shared += ["row" for p in spec.planes if p.span is None]
    return ", ".join(shared) or "-"


def row_bytes(spec: Spec, dim: int) -> int | None:
    """Bytes of a stored row, None where the codec refuses the head_dim."""
    try:
        return spec.row_bytes(dim)
    except RowError:
        return None


def figure(value: float) -> str:
    """Three significant digits."""
    return f"{value:.3g}"


def mean_figure(error: Measured) -> str:
    """The mean error beside its noise."""
    return f"{error.mean_error:.2g} ± {error.mean_noise:.1g}" if error.mean_noise else "0"


def render(table: list[FormatRow]) -> str:
    """The table as aligned text, which is Markdown too."""
    head = ["codec", "bits per value", "block"]
    head += [f"bytes at {dim}" for dim in HEAD_DIMS] + ["relative rms error", "mean error"]
    return grid(
        [
            head,
            *(
                [
                    row.name,
                    f"{row.bits_per_value:g}",
                    row.block,
                    *("-" if size is None else str(size) for size in row.row_bytes),
                    figure(row.error.relative_rms),
                    mean_figure(row.error),
                ]
                for row in table
            ),
        ]
    )


def grid(lines: list[list[str]]) -> str:
    """Cells as an aligned Markdown table, the first line its head, the first column to the left."""
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    text = []
    for cells in (lines[0], rule, *lines[1:]):
        padded = [cells[0].ljust(widths[0])]
        padded += [c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True)]
        text.append("| " + " | ".join(padded) + " |\n")
    return "".join(text)
