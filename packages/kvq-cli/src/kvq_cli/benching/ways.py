"""The ways to a prompt's past: as the backend of extends chooses, and each by itself."""

from __future__ import annotations

from collections.abc import Iterable

from kvq_attention import ops
from kvq_attention.bench.cases import Formats
from kvq_attention.bench.extend import routes
from kvq_attention.routes import Route
from kvq_cli.benching.plan import EnginePlan
from kvq_cli.config import ConfigError, distinct, parse_formats
from kvq_cli.engine.engine import Engine

AS_STORED = "all rows of this cache are read as they are stored, there is nothing to decode"


def check_ways(plan: EnginePlan, backends: Iterable[str]) -> None:
    """`ConfigError` where a run that is to compare routes has nothing to compare.

    backends : that serve the extends of the run
    """
    if not any(map(plan.compares, plan.cases)):
        raise ConfigError(
            "--extend-routes compares the ways in which a prompt reads the tokens before it, and "
            f"no case is a prompt over a past: {', '.join(case.name for case in plan.cases)}; give "
            "one as NEW+PAST with a PAST of 1 or more, such as 2k+8k"
        )
    if not any(map(ops.extend_routes, backends)):
        raise ConfigError(
            "--extend-routes compares the ways in which a prompt reads the tokens before it, and "
            f"extends of this run go by {', '.join(backends)}, which has one way only: there is "
            "nothing to compare. Leave the option out, or measure a backend that has several, such "
            "as triton on a GPU"
        )


def ways(engine: Engine) -> tuple[dict[str, Route | None], dict[str, str]]:
    """Routes by name, the chosen one first; and those that have nothing to do here, with why.

    Formats may differ by layer: a route that any of them has is one.
    """
    choice = engine.cache.choice
    backend, found = choice.backends.extend, dict[str, Route | None]()
    for each in distinct(parse_formats(choice.cache_dtype, engine.runner.geometry)):
        found |= routes(backend, Formats(each.k, each.v))
    others = (route.name for route in ops.extend_routes(backend))
    return found, {name: AS_STORED for name in others if name not in found}
