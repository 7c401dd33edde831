"""The engine without HTTP, measured: `kvq bench engine`."""

from kvq_cli.benching.plan import EnginePlan
from kvq_cli.benching.report import notes, tables
from kvq_cli.benching.session import run

__all__ = ["EnginePlan", "notes", "run", "tables"]
