"""Engines that replay prompts' chunks, here by the same calls."""

from typing import Any

from graph_captures import REFERENCE, capture_here, replayed
from tiny_models import make_engine

from kvq_attention.support import Choice
from kvq_cli.engine.engine import Engine


def engine_over(
    model: Any, tokens: int | None, backends: Choice = REFERENCE, **options: Any
) -> Engine:
    """An engine that replays chunks of up to so many tokens; their replays are noted."""
    replayed.clear()
    engine = make_engine(model, cuda_graph_max_prefill_tokens=tokens, backends=backends, **options)
    if engine.runner.device.type == "cpu":
        engine.runner._capture = lambda: capture_here
    return engine


def made(engine: Engine) -> list[tuple[int, int]]:
    """Tokens and reach of the graphs that there are."""
    prompts = engine.runner._prompts
    return [] if prompts is None else [(size, reach) for size, reach, _ in prompts.making.graphs]
