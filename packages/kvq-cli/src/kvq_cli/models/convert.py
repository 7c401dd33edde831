"""GGUF to a safetensors directory, once for each file.

Weights are stored as float32: decoded blocks are float32 values, so a comparison in float32 sees
the file's weights and no rounding of ours; a narrower dtype is chosen when the model is loaded.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import platformdirs
from safetensors.numpy import save_file
from transformers import GenerationConfig, PreTrainedConfig

from kvq_cli.models.gguf_config import hf_config
from kvq_cli.models.gguf_file import GgufFile, read_gguf
from kvq_cli.models.gguf_tokenizer import build_tokenizer
from kvq_cli.models.gguf_weights import parameter, parameter_places

Progress = Callable[[str, int, int], None]
REVISION = 1  # of this conversion: another one never reads what an older one wrote
SHARD_BYTES = 1 << 30
_CHUNK_BYTES = 1 << 24


def no_progress(description: str, completed: int, total: int) -> None:
    """Show nothing."""


def default_cache_dir() -> Path:
    """Where converted models live."""
    return Path(platformdirs.user_cache_dir("kvq", appauthor=False)) / "models"


def convert(path: Path, *, cache_dir: Path | None = None, progress: Progress = no_progress) -> Path:
    """The safetensors directory of a GGUF file, written unless it is there already.

    A directory gets its name when it is complete and on disk: two processes may convert the same
    file at once, and one that is killed leaves nothing that would be used.

    Parameters
    ----------
    cache_dir : holds the converted models; default the user's cache directory
    progress : called with a description, bytes done and bytes in all

    Raises
    ------
    GgufError : the file is damaged or of a kind that is not converted
    OSError : reading or writing failed, for example for want of room
    """
    file = read_gguf(path)
    models = cache_dir or default_cache_dir()
    models.mkdir(parents=True, exist_ok=True)
    target = models / f"{path.stem}-{_digest(path, progress)}-r{REVISION}"
    if target.is_dir():
        return target
    config = hf_config(file)
    places = parameter_places(file, config)
    with tempfile.TemporaryDirectory(
        dir=models, prefix=f".{target.name}-", ignore_cleanup_errors=True
    ) as temporary:
        work = Path(temporary) / target.name
        work.mkdir()
        _write_settings(work, file, config)
        _write_weights(work, file, config, places, progress)
        _flush(work)
        _publish(work, target)
    return target


def _digest(path: Path, progress: Progress) -> str:
    total, done = path.stat().st_size, 0
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress(f"checking {path.name}", done, total)
    return digest.hexdigest()[:16]


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
    progress: Progress,
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
            progress(f"converting {file.path.name}", done, total)
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
        with file.open("rb") as handle:
            os.fsync(handle.fileno())


def _publish(work: Path, target: Path) -> None:
    try:
        work.rename(target)
    except OSError as error:
        # another process was faster: its copy is complete and the same
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
