"""Geometries made up for tests."""

from __future__ import annotations

from typing import Any

from kvq_cli.config import ModelGeometry


def shape(**changes: Any) -> ModelGeometry:
    """A llama of two layers, 4/2 heads × 64, changed as asked."""
    facts = {
        "model_type": "llama", "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64,
        "hidden_size": 256, "vocab_size": 8, "max_position": 16, "windows": (None, None),
    }  # fmt: skip
    return ModelGeometry(**(facts | changes))
