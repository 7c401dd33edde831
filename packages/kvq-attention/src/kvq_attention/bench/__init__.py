"""How fast the ops are on this machine, beside what its memory allows: `run(plan(...))`.

Every figure of a run is set against a read ceiling and a bf16 cache measured in the same run, on
rows that the ops encoded themselves; every case is also compared with attention in float64.
"""

from kvq_attention.bench.files import check_writable
from kvq_attention.bench.plan import Plan, plan
from kvq_attention.bench.report import Table, as_json, notes, problems, tables
from kvq_attention.bench.session import run

__all__ = [
    "Plan",
    "Table",
    "as_json",
    "check_writable",
    "notes",
    "plan",
    "problems",
    "run",
    "tables",
]
