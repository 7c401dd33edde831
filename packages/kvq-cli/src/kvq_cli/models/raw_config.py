"""A model's config as a plain mapping, read without transformers and torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvq_cli.config import ConfigError
from kvq_cli.models.gguf_config import settings
from kvq_cli.models.gguf_file import read_gguf
from kvq_cli.models.source import resolve


def raw_config(path: Path) -> dict[str, Any]:
    """What a config.json, or the header of a GGUF file, says about its model.

    Raises
    ------
    ConfigError : no such file, or not a JSON object
    GgufError : a damaged file, or an architecture that is not converted
    """
    if path.suffix.lower() == ".gguf":
        return settings(read_gguf(path))
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; give it as MODEL, without --config")
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is not JSON of a config: it is nested too deeply") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a JSON {type(config).__name__}, not an object of settings")
    return config


def find_config(model: str | Path) -> tuple[str, Path]:
    """The name of a model and the file that describes it: a config.json or a GGUF file.

    Parameters
    ----------
    model : the file itself, or, as text, what `kvq serve` takes; a directory needs no weights

    Raises
    ------
    ConfigError : nothing there describes a model
    """
    path = Path(model).expanduser()
    if isinstance(model, str) and path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ConfigError(f"{path.parent} holds no config.json; name the model's directory")
    elif isinstance(model, str):
        if path.suffix == ".json" and path.is_file():
            raise ConfigError(f"{model} is a config, not a model; give it with --config {model}")
        source = resolve(model)
        return source.name, source.path
    path = path.resolve()
    return (path.parent.name if path.name == "config.json" else path.stem), path
