"""`kvq` with an engine that is scripted: run as a program, it takes kvq's command line.

The model's name says what its loading does: `refused`, `defective`, `endless`, or it succeeds
(`untemplated`: with a model that cannot chat; `stubborn`: with an engine in a step without end;
`hasty`: with little patience for requests in flight when it is to stop).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

from scripted_engine import ScriptedEngine

from kvq_cli.config import ConfigError
from kvq_cli.main import main
from kvq_cli.server import run


class StubbornEngine(ScriptedEngine):
    async def stop(self, patience: float | None = None) -> None:
        if self.running:
            print("stopping", flush=True)
            self.running = False
            await asyncio.to_thread(time.sleep, 60 if patience is None else patience)


def build_engine(options: SimpleNamespace, report: Any, progress: Any) -> ScriptedEngine:
    report(f"options {json.dumps(vars(options))}")
    progress("converting [weights]", 1, 3)
    match options.model:
        case "refused":
            raise ConfigError("head_dim 64 of [this] model does not fit")
        case "defective":
            raise ValueError("a defect")
        case "endless":
            report("loading")
            time.sleep(60)
        case "hasty":
            run.DRAIN_SECONDS = 0.5
    make = StubbornEngine if options.model == "stubborn" else ScriptedEngine
    return make(
        words=10_000,
        pause=0.01,
        model_name=options.served_model_name or "it's a model",
        chat_template=None if options.model == "untemplated" else "{{ messages }}",
    )


if __name__ == "__main__":
    compose: Any = ModuleType("kvq_cli.compose")
    compose.ServeOptions = SimpleNamespace
    compose.build_engine = build_engine
    sys.modules["kvq_cli.compose"] = compose
    main()
