"""`python -m kvq_attention.bench`: what `kvq bench attention` does, where kvq-cli is not there."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvq_attention.bench.plan import DEVICES, plan
from kvq_attention.bench.report import as_json, problems, tables
from kvq_attention.bench.session import Record, run
from kvq_attention.errors import AttentionError
from kvq_codecs import CodecError


def main() -> int:
    """Measure, print tables, record; 2 = refused, 4 = something failed or is wrong."""
    parser = argparse.ArgumentParser("python -m kvq_attention.bench", description=__doc__)
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    for name in ("codecs", "cases", "pages", "shape", "store-tokens", "copy-tokens"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--backend", default="auto")
    for name in ("repeat", "jobs"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--budget-seconds", type=float, default=330.0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = vars(parser.parse_args())
    path: Path | None = given.pop("json")

    def keep(record: Record) -> None:
        if path is not None:
            path.write_text(as_json(record), "utf-8")

    def tell(name: str, done: int, total: int) -> None:
        print(f"[{done}/{total}] {name}", file=sys.stderr, flush=True)

    try:
        record = run(plan(**given), tell, keep)
    except (AttentionError, CodecError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(*tables(record), sep="\n\n")
    wrong = problems(record)
    print("", *wrong, *(f"not measured: {name}" for name in record["left_out"]), sep="\n")
    return 4 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
