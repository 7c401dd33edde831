"""Write everything in this repository that can be derived from its code; --check only compares.

Each entry of `generated()` is one file and its whole text. A page under docs/reference/formats
that no longer belongs to a codec is stale too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attention_page
import quality_page

from kvq_attention import claims
from kvq_cli import config, plots
from kvq_cli.commands import reference
from kvq_cli.evaluation import picture
from kvq_codecs import pages, table

ROOT = Path(__file__).parents[1]
FORMATS = ROOT / "docs" / "reference" / "formats"
BENCHMARKS = ROOT / "docs" / "benchmarks"
BENCHMARKS_HEAD = """# Benchmarks

Every figure names the machine and the command that made it. The records are the JSON files beside
this page, as `kvq bench` and the packages' benchmarks write them with `--json`.
[Attention](attention.md) and [what formats cost](quality.md) have pages of their own.
"""
BEGIN, END = "<!-- formats: begin, generated -->", "<!-- formats: end -->"


def generated() -> Iterator[tuple[Path, str]]:
    """Every generated file and the text it must have."""
    readme = ROOT / "README.md"
    yield readme, between_markers(readme, table.render(table.rows()))
    evaluations = {name: r for name, r in records().items() if r.get("kind") == quality_page.KIND}
    for name, text in pages.pages().items():
        codec = name.removesuffix(".md")
        measured = "" if codec == "index" else quality_page.format_section(codec, evaluations)
        yield FORMATS / name, text + measured
    yield ROOT / "docs" / "reference" / "cli.md", reference.markdown()
    yield ROOT / "docs" / "reference" / "support.md", claims.markdown()
    yield ROOT / "docs" / "reference" / "models.md", models_page()
    yield BENCHMARKS / "index.md", benchmarks_page()
    yield BENCHMARKS / "attention.md", attention_text()
    yield BENCHMARKS / "quality.md", quality_page.markdown(evaluations)
    for name, record in records().items():
        draw = picture.scatter if name in evaluations else plots.bar_chart
        yield BENCHMARKS / f"{name}.svg", draw(record)


def between_markers(path: Path, text: str) -> str:
    """The file's text with what stands between its markers replaced."""
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        sys.exit(f"{path.relative_to(ROOT)} must hold the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{text.strip()}\n{END}{after}"


def models_page() -> str:
    """The families of models that are served, and those that are planned only."""
    served = "".join(f"- `{family}`\n" for family in config.SERVED)
    planned = "".join(f"- `{name}`\n" for name in config.PLANNED if name not in config.SERVED)
    return f"""# Models

`kvq serve` takes models of these families, by the `model_type` of their `config.json`. A GGUF file
of an architecture that is not converted is refused with those that are.

{served}
Of those with linear-attention layers (Qwen3-Next, Qwen3.5) the other layers are cached; these keep
a state a running request, of float32 matrices, and snapshots of states beside cached pages
([prefix sharing](../explanation/prefix-sharing.md#states-beside-pages)). CUDA graphs
replay their decodes, and no prompts.

Others are refused with the reason: encoder-decoder models, latent or sparse attention, state-space
layers, and families that have not been proved to work.

`kvq plan` also works out what these store:

{planned}
A multimodal model counts as its text part: `gemma3`, `gemma4`, `qwen3_5`, `qwen3_5_moe` and
`qwen4_exp` are read too.
"""


def benchmarks_page() -> str:
    """One section per record in docs/benchmarks, each with its machine and its command."""
    sections = [
        section(name, record) for name, record in records().items() if not has_a_page(record)
    ]
    return "\n".join([BENCHMARKS_HEAD, *(sections or ["Nothing is recorded yet.\n"])])


def records() -> dict[str, Any]:
    """Every benchmark record by name."""
    return {p.stem: json.loads(p.read_text()) for p in sorted(BENCHMARKS.glob("*.json"))}


def attention_text() -> str:
    """The page of attention: what `kvq bench attention` measured, and what counters say of it."""
    kinds: dict[str, dict[str, Any]] = {"attention": {}, "attention-counters": {}}
    for name, record in records().items():
        if str(record.get("kind", "")).startswith("attention"):
            kinds[record["kind"]][name] = record
    measured = attention_page.markdown(kinds["attention"])
    counted = (section(name, record) for name, record in kinds["attention-counters"].items())
    return "\n".join([measured, *counted])


def has_a_page(record: dict[str, Any]) -> bool:
    """Whether the record belongs on a page of its kind."""
    return str(record.get("kind", "")).startswith(("attention", quality_page.KIND))


def cell(value: Any) -> str:
    """A figure, a name, or figures by name."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {figure}" for key, figure in value.items())
    return str(value)


def section(name: str, record: dict[str, Any]) -> str:
    """One record as text: what was measured, how, where, and the rows as a table."""
    rows = record["rows"]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    versions = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
    lines = [
        f"## {record['title']}\n",
        f"- What: {record['what']}.",
        f"- Machine: {record['hardware']}.",
        f"- Command: `{record['command']}`.",
        f"- Versions: {versions}.",
        f"- Record: [{name}.json]({name}.json).\n",
        f"![{record['title']}]({name}.svg)\n",
        "| " + " | ".join(column.replace("_", " ") for column in columns) + " |",
        "|" + " --- |" * len(columns),
        *(
            "| " + " | ".join(cell(row.get(c, "")) for c in columns) + " |"
            for row in record["rows"]
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write what differs, or with --check name it and exit 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail when stale")
    check = parser.parse_args().check

    wanted = dict(generated())
    stale = [p for p, text in wanted.items() if not p.is_file() or p.read_text() != text]
    orphans = [p for p in FORMATS.glob("*.md") if p not in wanted]
    if not check:
        for path in stale:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path])
        for path in orphans:
            path.unlink()
    for path in [*stale, *orphans]:
        print(f"{'stale' if check else 'updated'}: {path.relative_to(ROOT)}")
    if check and (stale or orphans):
        sys.exit("run `nox -s gen` and commit what it writes")
    print(f"{len(wanted)} generated files {'checked' if check else 'are up to date'}")


if __name__ == "__main__":
    main()
