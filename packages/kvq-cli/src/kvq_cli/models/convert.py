"""GGUF to a safetensors directory, once for each file.

Weights are stored as float32: decoded blocks are float32 values, so a comparison in float32 sees
the file's weights and no rounding of ours; a narrower dtype is chosen when the model is loaded.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import platformdirs
from safetensors import SafetensorError
from safetensors.numpy import save_file
from transformers import GenerationConfig, PreTrainedConfig

from kvq_cli.config import ConfigError
from kvq_cli.models.gguf_config import hf_config
from kvq_cli.models.gguf_file import GgufFile, read_gguf
from kvq_cli.models.gguf_tokenizer import build_tokenizer
from kvq_cli.models.gguf_weights import parameter, parameter_places

Progress = Callable[[str, int, int], None]
REVISION = 1  # of this conversion: another one never reads what an older one wrote
SHARD_BYTES = 1 << 30
_CHUNK_BYTES = 1 << 24
_ABANDONED_SECONDS = 24 * 3600


class ConversionError(ConfigError):
    """The converted model could not be written; nothing is left of it."""


def default_cache_dir() -> Path:
    """Where converted models live."""
    return Path(platformdirs.user_cache_dir("kvq", appauthor=False)) / "models"


def convert(path: Path, *, cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """The safetensors directory of a GGUF file, written unless it is there already.

    A directory gets its name when it is complete and on disk: two processes may convert the same
    file at once, and what a killed one leaves is never used.

    Parameters
    ----------
    cache_dir : holds the converted models; default the user's cache directory
    progress : called with a description, bytes done and bytes in all; default nobody is told

    Raises
    ------
    GgufError : the file is damaged or of a kind that is not converted
    ConversionError : the result cannot be written, for example for want of room
    """
    tell = progress or (lambda description, completed, total: None)
    file = read_gguf(path)
    models = cache_dir or default_cache_dir()
    target = models / f"{path.stem}-{_digest(path, tell)}-r{REVISION}"
    if target.is_dir():
        return target
    config = hf_config(file)
    places = parameter_places(file, config)
    try:
        models.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(models)
        _check_room(models, 4 * sum(prod(t.shape) for t in file.tensors.values()))
        with tempfile.TemporaryDirectory(
            dir=models, prefix=".partial-", ignore_cleanup_errors=True
        ) as temporary:
            work = Path(temporary) / target.name
            work.mkdir()
            _write_settings(work, file, config)
            _write_weights(work, file, config, places, tell)
            _flush(work)
            _publish(work, target)
    except (OSError, SafetensorError) as error:
        raise ConversionError(f"{path} could not be converted into {models}: {error}") from error
    return target


def _digest(path: Path, tell: Progress) -> str:
    total, done = path.stat().st_size, 0
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            tell(f"checking {path.name}", done, total)
    return digest.hexdigest()[:16]


def _remove_abandoned(models: Path) -> None:
    """Delete what processes that were killed half-way left long ago."""
    for leftover in models.glob(".partial-*"):
        if time.time() - leftover.stat().st_mtime > _ABANDONED_SECONDS:
            shutil.rmtree(leftover, ignore_errors=True)


def _check_room(models: Path, needed: int) -> None:
    free = shutil.disk_usage(models).free
    if needed > free:
        raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed there and {free:,} are free")


def _write_settings(work: Path, file: GgufFile, config: PreTrainedConfig) -> None:
    config.dtype = "float32"
    config.save_pretrained(work)
    settings: Any = GenerationConfig
    settings(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    ).save_pretrained(work)
    build_tokenizer(file).save_pretrained(work)


def _write_weights(
    work: Path,
    file: GgufFile,
    config: PreTrainedConfig,
    places: dict[str, str],
    tell: Progress,
) -> None:
    sizes = {name: 4 * prod(file.tensors[place].shape) for name, place in places.items()}
    shards = _shards(sizes)
    total, done = sum(sizes.values()), 0
    where: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        held = {}
        for name in names:
            held[name] = parameter(file, config, name, places[name])
            done += sizes[name]
            tell(f"converting {file.path.name}", done, total)
        shard = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(held, work / shard, metadata={"format": "pt"})
        where.update(dict.fromkeys(names, shard))
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (work / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _shards(sizes: dict[str, int]) -> list[list[str]]:
    """Parameters in order, cut where a shard would pass `SHARD_BYTES`."""
    shards: list[list[str]] = [[]]
    room = SHARD_BYTES
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= size
    return shards


def _flush(work: Path) -> None:
    """Put every byte on disk, so that the name given next never means less than all of them."""
    for file in work.iterdir():
        with file.open("rb+") as handle:
            os.fsync(handle.fileno())


def _publish(work: Path, target: Path) -> None:
    try:
        work.rename(target)
    except OSError:
        # another process was faster: its copy is complete and the same
        if not target.is_dir():
            raise
