"""Models from disk. Nothing is downloaded, and no code that comes with a model is run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.utils import logging

from kvq_cli.config import ConfigError, ModelGeometry, check_servable, geometry
from kvq_cli.models.convert import Progress, convert
from kvq_cli.models.gguf_config import hf_config
from kvq_cli.models.gguf_file import read_gguf
from kvq_cli.models.source import ModelSource

_LOCAL = {"local_files_only": True, "trust_remote_code": False}


class ModelLoadError(ConfigError):
    """A directory whose files do not make the model that its config describes."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run.

    Attributes
    ----------
    model : transformers' module, in eval mode, on its device
    tokenizer : transformers' tokenizer
    name : what the server calls it
    """

    model: Any
    tokenizer: Any
    geometry: ModelGeometry
    name: str

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights; what several layers share counts once."""
        return sum(weights.nbytes for weights in self.model.parameters())


def read_config(source: ModelSource) -> PreTrainedConfig:
    """A model's config, without its weights and before any conversion: cheap enough to refuse by.

    Raises
    ------
    GgufError : a damaged file or one that is not converted
    ModelLoadError : a config.json that transformers cannot read
    """
    if source.kind == "gguf":
        return hf_config(read_gguf(source.path))
    with _explained(source.path):
        config: PreTrainedConfig = AutoConfig.from_pretrained(source.path, **_LOCAL)
        if (source.path / "generation_config.json").is_file():
            # instruction-tuned models end their turns with tokens that only this file knows
            ends = GenerationConfig.from_pretrained(source.path, local_files_only=True).eos_token_id
            if ends is not None:
                config.get_text_config().eos_token_id = ends
    return config


def load(
    source: ModelSource,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    cache_dir: Path | None = None,
    check: Callable[[Any], None] = lambda _: None,
) -> LoadedModel:
    """A model's weights and tokenizer; a GGUF file is converted the first time.

    Parameters
    ----------
    dtype : of the weights and of what is computed with them
    progress : called with a description, how much is done and how much there is
    cache_dir : of converted models; default the user's cache directory
    check : given the tokenizer before weights are read; what it raises ends the loading

    Raises
    ------
    UnsupportedModel : before any weights are read
    ModelLoadError : files are missing, damaged or do not fit the config
    GgufError, ConversionError : as `convert`
    """
    facts = geometry(read_config(source).to_dict())
    check_servable(facts)
    directory = source.path
    if source.kind == "gguf":
        directory = convert(source.path, cache_dir=cache_dir, progress=progress)
    if progress:
        progress(f"loading {source.name}", 0, 1)
    tokenizer = _tokenizer(directory)
    check(tokenizer)
    with _explained(directory):
        model = _weights(directory, dtype).to(device)
    if progress:
        progress(f"loading {source.name}", 1, 1)
    return LoadedModel(model=model, tokenizer=tokenizer, geometry=facts, name=source.name)


def _tokenizer(directory: Path) -> Any:
    try:
        with _explained(directory):
            return AutoTokenizer.from_pretrained(directory, **_LOCAL)
    except ModelLoadError as error:
        if (directory / "tokenizer.json").is_file():
            raise
        # transformers tries whatever else there is, and complains of what that would need
        raise ModelLoadError(
            f"the model in {directory} cannot be loaded: it has no tokenizer.json; fetch that file "
            "of the model, too"
        ) from error


def _weights(directory: Path, dtype: torch.dtype) -> Any:
    read: Any = AutoModelForCausalLM.from_pretrained
    with _quiet():
        model, report = read(directory, dtype=dtype, output_loading_info=True, **_LOCAL)
    lacking = sorted(report["missing_keys"])
    if lacking:
        raise ModelLoadError(
            f"{directory}: {len(lacking)} weights are missing, {lacking[0]} among them; "
            "fetch the model again"
        )
    return model.eval().requires_grad_(False)


@contextmanager
def _explained(directory: Path) -> Iterator[None]:
    """Name the directory in what transformers and safetensors complain of."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # damaged files make transformers raise anything at all
        said = " ".join(str(error).split())
        raise ModelLoadError(
            f"the model in {directory} cannot be loaded: {type(error).__name__}: {said}"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from drawing a progress bar of its own."""
    bars: Any = logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()
