"""Where a model comes from: `demo`, a directory, or a GGUF file. Nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvq_cli.config import ConfigError
from kvq_cli.models.demo import DEMO_NAME, demo_file

ACCEPTED = (
    "a directory that holds config.json and *.safetensors, a .gguf file, or 'demo' "
    f"({DEMO_NAME} from its package)"
)


class SourceError(ConfigError):
    """A model reference that leads nowhere; the message says what is accepted."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on disk.

    Attributes
    ----------
    path : the directory or the file
    kind : "directory" or "gguf"
    name : what the server calls it
    """

    path: Path
    kind: Literal["directory", "gguf"]
    name: str


def resolve(ref: str) -> ModelSource:
    """The source that `ref` names.

    Raises
    ------
    SourceError : not one of the accepted kinds, or incomplete (names what is missing)
    DemoMissing : `demo` without its package (names the command that installs it)
    """
    if not ref:
        raise SourceError(f"the model's name is empty; a model is {ACCEPTED}")
    if ref == "demo":
        return ModelSource(demo_file(), "gguf", DEMO_NAME)
    path = Path(ref).expanduser()
    if path.is_dir():
        return _directory(path.resolve())
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise SourceError(f"there is no file {ref}; a model is {ACCEPTED}")
        return ModelSource(path.resolve(), "gguf", path.stem)
    if path.is_file():
        raise SourceError(f"{ref} is a file but not a .gguf one; a model is {ACCEPTED}")
    hint = (
        ". If it is a hub id: kvq downloads nothing; fetch it first "
        f"(hf download {ref} --local-dir DIR) and give that directory"
        if ref.count("/") == 1 and not ref.startswith((".", "/", "~"))
        else ""
    )
    raise SourceError(f"there is no model at {ref!r}; a model is {ACCEPTED}{hint}")


def _directory(path: Path) -> ModelSource:
    missing = [
        what
        for what, found in (
            ("config.json", (path / "config.json").is_file()),
            ("*.safetensors", any(path.glob("*.safetensors"))),
        )
        if not found
    ]
    if missing:
        gguf = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; it holds {', '.join(gguf)}: give that file itself" if gguf else ""
        raise SourceError(f"{path} is not a model: it has no {' and no '.join(missing)}{hint}")
    return ModelSource(path, "directory", path.name)
