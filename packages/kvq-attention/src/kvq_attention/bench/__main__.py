"""`python -m kvq_attention.bench`: what `kvq bench attention` does, where kvq-cli is not there."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvq_attention import support
from kvq_attention.bench.files import check_writable, write
from kvq_attention.bench.plan import BUDGET_SECONDS, DEFAULTS, DEVICES, MEASURED, plan
from kvq_attention.bench.report import as_json, notes, problems, tables
from kvq_attention.bench.session import Record, run
from kvq_attention.errors import AttentionError
from kvq_codecs import CodecError


def main() -> int:
    """Measure, print tables, record; 2 = refused, 4 = something failed or is wrong."""
    given = vars(_parser().parse_args())
    path: Path | None = given.pop("json")
    given["backend"] = given["backend"] or support.AUTO

    def keep(record: Record) -> None:
        if path is not None:
            write("--json", path, as_json(record))

    def tell(name: str, done: int, total: int) -> None:
        print(f"[{done}/{total}] {name}", file=sys.stderr, flush=True)

    try:
        chosen = plan(**given)
        if path is not None:
            check_writable("--json", path)
        record = run(chosen, tell, keep)
    except (AttentionError, CodecError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(*tables(record), sep="\n\n")
    wrong = problems(record)
    print("", *wrong, *notes(record), sep="\n")
    return 4 if wrong else 0


def _parser() -> argparse.ArgumentParser:
    usual = DEFAULTS["cuda"]
    backends = "|".join((support.AUTO, *support.BACKENDS, "OP=BACKEND,…"))
    # option → what its value is, and what it is for; defaults are those of a GPU
    lists = {
        "shape": ("HEADS/KV_HEADSxHEAD_DIM,…", "layers, the most important first", usual.shape),
        "codecs": ("CODEC,…", "formats beside bf16, k=CODEC,v=CODEC among them", "every codec"),
        "cases": (
            "CASE,…",
            "BATCHxCONTEXT, or NEW+PAST of extend, first things first",
            usual.cases,
        ),
        "pages": ("TOKENS,…", "tokens a page", usual.pages),
        "store-tokens": ("TOKENS,…", "tokens of a store", usual.store_tokens),
        "copy-tokens": ("TOKENS,…", "tokens whose pages are copied at once", usual.copy_tokens),
    }
    numbers = {
        "repeat": ("TIMES", "timed repetitions, of which the median counts", usual.repeat),
        "jobs": ("PROCESSES", "processes that compile kernels before anything", usual.jobs),
    }
    parser = argparse.ArgumentParser(
        "python -m kvq_attention.bench",
        description="Measure decode, store and page copies, or extend, beside bf16.",
    )
    add = parser.add_argument
    add("--op", choices=MEASURED, default="decode", help="decode, stores and copies, or extend")
    add("--device", choices=DEVICES, default="cuda", help="cpu: tiny shapes, to try the command")
    add(
        "--attention-backend", "--backend", dest="backend", action="append", metavar=backends,
        help="what runs the ops; given several times, each is measured (default: auto)",
    )  # fmt: skip
    for name, (value, meaning, default) in lists.items():
        add(f"--{name}", metavar=value, help=f"{meaning} (default: {default})")
    for name, (value, meaning, count) in numbers.items():
        add(f"--{name}", type=int, metavar=value, help=f"{meaning} (default: {count})")
    add(
        "--budget-seconds", type=float, metavar="SECONDS", default=BUDGET_SECONDS,
        help="no measurement begins after as many (default: %(default)g)",
    )  # fmt: skip
    add("--quick", action="store_true", help="the first of each list, for bf16, q8_0 and q4_0")
    add("--json", type=Path, metavar="FILE", help="record every figure there, as it is measured")
    return parser


if __name__ == "__main__":
    sys.exit(main())
