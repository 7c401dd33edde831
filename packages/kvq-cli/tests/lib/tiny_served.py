"""Servers of tiny models on a machine that has as much memory as a test says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from evaluating import Words
from tiny_models import LAYERS_4_2, SMALL
from transformers import LlamaConfig, LlamaForCausalLM

from kvq_cli import compose, machine
from kvq_cli.automatic import Room, room_for
from kvq_cli.config import geometry
from kvq_cli.models.loader import LoadedModel
from kvq_cli.models.source import resolve
from kvq_cli.serve_options import ServeOptions

CPU, DTYPE = torch.device("cpu"), torch.float32


def llama_of(**config: Any) -> LlamaForCausalLM:
    """Of four query and two key/value heads × 32."""
    return LlamaForCausalLM(LlamaConfig(**SMALL | LAYERS_4_2 | {"head_dim": 32} | config)).eval()


def loaded_from(model: Any) -> LoadedModel:
    """As if it had been loaded."""
    return LoadedModel(model, Words(), geometry(model.config.to_dict()), "tiny")


def serve_instead(
    monkeypatch: pytest.MonkeyPatch, path: Path, model: Any, free_bytes: int
) -> LoadedModel:
    """Have `build_engine` of a path serve a model, whose weights take no memory that is seen."""
    model.save_pretrained(path)
    loaded = loaded_from(model)
    monkeypatch.setattr(compose, "load", lambda *_, **__: loaded)
    monkeypatch.setattr(machine, "free_bytes", lambda device, mapped_bytes=0: free_bytes)
    return loaded


def options_of(path: Path, **options: Any) -> ServeOptions:
    """On a CPU, in float32."""
    return ServeOptions(str(path), device="cpu", dtype="float32", **options)


def room_of(path: Path, loaded: LoadedModel, **options: Any) -> Room:
    """What is there before the weights load."""
    wanted = options_of(path, **options)
    return room_for(resolve(str(path)), loaded.geometry, wanted, CPU, DTYPE)
