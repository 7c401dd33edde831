"""What weights will take, against what they take."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from tiny_families import tiny
from transformers import AutoModelForCausalLM

from kvq_cli.models.source import ModelSource
from kvq_cli.models.weight_bytes import weight_bytes


def taken(model) -> int:
    return sum(weight.nbytes for weight in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_directorys_weights_in_the_type_that_is_computed_with(tmp_path, dtype):
    tiny("qwen3_moe").save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    found = weight_bytes(ModelSource(tmp_path, "directory", "m"), dtype.itemsize)
    assert found == taken(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype))


def test_a_gguf_files_weights_as_they_will_be_converted(smollm2_gguf, smollm2):
    assert weight_bytes(ModelSource(smollm2_gguf, "gguf", "m"), 4) == taken(smollm2.model)


def test_types_that_loading_keeps_count_as_stored(tmp_path):
    save_file(
        {"a": torch.zeros(8, dtype=torch.int8), "b": torch.zeros(3, dtype=torch.int32)},
        tmp_path / "model.safetensors",
    )
    assert weight_bytes(ModelSource(tmp_path, "directory", "m"), 2) == 8 + 12


def test_a_damaged_file_is_left_for_loading_to_tell(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    assert weight_bytes(ModelSource(tmp_path, "directory", "m"), 2) == 0
