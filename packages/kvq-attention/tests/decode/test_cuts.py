"""Where a prompt that reads everything packed is cut into steps changes no bit of a decode.

Of a request that is one chunk: longer ones are cut into chunks whose size follows their length.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ..scene import Scene
from .cases import ieee
from .places import KINDS, TRITONS, Place, each_place

pytestmark = ieee

LENGTH = 35
WINDOW = {"window": 21, "softcap": 3.0}


def part(scene: Scene, start: int, stop: int) -> Scene:
    """The only request of a scene when tokens [start, stop) are its step."""
    shape = replace(scene.geometry, lengths=(stop,), queries=(stop - start,))
    return replace(scene, geometry=shape, qs=[scene.qs[0][start:stop]])


@pytest.mark.parametrize(
    ("codec", "scoring"), [("q4_0", {}), *((codec, WINDOW) for codec in KINDS)], ids=str
)
@each_place(TRITONS)
def test_a_query_has_the_same_bits_wherever_its_prompt_is_cut(
    codec: str, scoring: dict[str, Any], place: Place
) -> None:
    shape: dict[str, Any] = {"heads": 3, "kv_heads": 1, "dim": 128}
    scene = place.scene(codec, lengths=(LENGTH,), queries=LENGTH, **shape)
    whole = place.attend(scene, **scoring)
    for size in (1, 7, 16, 17):
        starts = range(0, LENGTH, size)
        parts = [part(scene, start, min(start + size, LENGTH)) for start in starts]
        outs = [place.attend(each, **scoring) for each in parts]
        assert torch.equal(torch.cat(outs), whole), f"in steps of {size}"
