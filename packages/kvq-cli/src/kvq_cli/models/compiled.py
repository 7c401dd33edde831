"""The small parts of a model, compiled: norms, rotary embedding and the feed-forward's product.

Written in torch each is a handful of kernels that read and write a few rows, and a step of decodes
has some thousand of them. torch.compile makes one kernel of each part, for any number of rows.
Attention and matrix products stay what they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kvq_cli.config import ConfigError

PARTS = ("RMSNorm", "MLP")  # how the names of their classes end
ROTARY = "apply_rotary_pos_emb"  # of the modules that models are written in


def compile_parts(model: Any, backend: str = "inductor") -> int:
    """Let a transformers model compute its small parts by compiled code; how many modules do.

    Rotary embedding is a function of the Python module that the model's class is in, and is
    replaced there: other models of that class compute the same by it.

    Raises
    ------
    ConfigError : torch cannot compile here
    """
    device = next(model.parameters()).device
    _try(backend, device)
    found = [m for m in model.modules() if type(m).__name__.endswith(PARTS)]
    compiled: dict[type, Callable[..., Any]] = {}
    for module in found:
        kind: Any = type(module)
        if kind not in compiled:  # one code for all layers, whose weights it is given
            compiled[kind] = _compile(kind.forward, backend)
        module.forward = partial(compiled[kind], module)
    for name in {type(module).__module__ for module in model.modules()}:
        rotary = getattr(sys.modules[name], ROTARY, None)
        if rotary is not None and not hasattr(rotary, "_torchdynamo_orig_callable"):
            setattr(sys.modules[name], ROTARY, _compile(rotary, backend))
    return len(found)


def _compile(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    # dynamic: rows are counted when it runs, or each size of a batch would be compiled anew
    return torch.compile(function, dynamic=True, backend=backend)


def _try(backend: str, device: torch.device) -> None:
    probe = _compile(lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True)), backend)
    try:
        probe(torch.ones(2, 8, device=device))
    except Exception as error:  # whatever a compiler raises
        first = " ".join(str(error).split("\n")[:2])  # the rest is a trace and advice
        raise ConfigError(
            f"--compile needs torch.compile, which fails here: {type(error).__name__}: {first}; "
            "install a C++ compiler (and, for a GPU, Triton), or leave --compile out"
        ) from error
