"""What the kernels are not made for is refused before a launch; the message names who takes it."""

from __future__ import annotations

import pytest
import torch

from kvq_attention import AttentionError
from kvq_attention.needs import name_of

from ..decode.places import CUDAS, Place, each_place

SIZES = {"heads": 2, "kv_heads": 1, "dim": 128, "lengths": (20,)}


@pytest.mark.parametrize("codecs", [("bf16", "q8_0"), ("q8_0", "bf16"), ("bf16", "bf16")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@each_place(CUDAS)
def test_rows_of_bf16_with_other_queries(
    codecs: tuple[str, str], dtype: torch.dtype, place: Place
) -> None:
    scene = place.scene(*codecs, **SIZES, dtype=dtype)
    with pytest.raises(AttentionError, match=f"bf16 rows .*{name_of(dtype)}.*triton"):
        place.attend(scene)


@each_place(CUDAS)
def test_keys_and_values_of_two_head_dims(place: Place) -> None:
    scene = place.scene("q8_0", **{**SIZES, "v_dim": 64})
    # what the launcher says, which the emulator is called through, and what the table does
    with pytest.raises(AttentionError, match=r"head_dim.* 128 .*64.*triton"):
        place.attend(scene)
