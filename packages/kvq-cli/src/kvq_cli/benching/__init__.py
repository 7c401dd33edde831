"""The engine without HTTP, measured: `kvq bench engine`."""

from kvq_cli.benching.plan import EnginePlan
from kvq_cli.benching.session import run, tables

__all__ = ["EnginePlan", "run", "tables"]
