"""`kvq` with an engine that is scripted: run as a program, it takes kvq's command line.

The model's name says what its loading does: `refused`, `defective`, `endless`, or it succeeds
(`untemplated`: with a model that cannot chat).
"""

from __future__ import annotations

import json
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

from scripted_engine import ScriptedEngine

from kvq_cli.config import ConfigError
from kvq_cli.main import main


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
    return ScriptedEngine(
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
