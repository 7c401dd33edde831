"""Where decode runs in tests: each backend, on the CPU and on a GPU.

On the CPU Triton's kernels run in its interpreter, which TRITON_INTERPRET=1 turns on before triton
is imported, and the CUDA kernels in our emulator, which needs g++; a place that cannot be had is
skipped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import kvq_codecs
from kvq_attention import Batch, Scoring, ops
from kvq_attention.claims import CUDA_HEAD_DIMS, TRITON_CODECS, TRITON_HEAD_DIMS
from kvq_attention.cuda import decode as cuda_decode
from kvq_attention.cuda import formats, items, module
from kvq_attention.triton import tiles
from kvq_attention.triton.compat import unavailable

from .. import scene
from ..cuda import emulated
from ..cuda.emulator.program import needs_compiler
from ..scene import TIER, Geometry, Scene
from .cases import DTYPES, check_output

Mark = pytest.MarkDecorator

SCORING = ("scale", "window", "softcap", "sinks")


@dataclass(frozen=True)
class Place:
    """A backend on a device.

    Attributes
    ----------
    backend, device : by name; of cuda on the CPU the kernels are emulated
    codecs, dims : that the backend has kernels for
    chunk : tokens that a request may have and still be one chunk, where calls have few
    marks : under which tests run there
    """

    backend: str
    device: str
    codecs: tuple[str, ...]
    dims: tuple[int, ...]
    chunk: int
    marks: tuple[Mark, ...] = field(repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.backend}-{self.device}"

    def dims_of(self, codec: str) -> tuple[int, ...]:
        """The head_dims of the kernels that a codec stores."""
        divisor = kvq_codecs.get(codec).spec.divisor
        return tuple(dim for dim in self.dims if dim % divisor == 0)

    def dtypes(self, *codecs: str) -> tuple[torch.dtype, ...]:
        """That queries may have; cuda multiplies bf16 rows with bf16 queries only."""
        if self.backend == "cuda" and "bf16" in codecs:
            return (torch.bfloat16,)
        return DTYPES

    def dtype(self, *codecs: str) -> torch.dtype:
        """The most exact of them."""
        return self.dtypes(*codecs)[-1]

    def scene(self, codec: str, v: str | None = None, *, seed: int = 0, **shape: Any) -> Scene:
        """A scene on the device whose caches hold every token."""
        shape = {"dtype": self.dtype(codec, v or codec), **shape}
        return scene.build(Geometry(codec, v, **shape), self.device, stored_queries=True, seed=seed)

    def attend(
        self,
        scene: Scene,
        only: int | None = None,
        released: int = 0,
        batch: Batch | None = None,
        q: torch.Tensor | None = None,
        **scoring: Any,
    ) -> torch.Tensor:
        """The kernel's output for a scene's batch, for one request of it, or for what is given."""
        if q is None:
            q = scene.q if only is None else scene.qs[only]
        scoring = {"scale": scene.scale, **scoring}
        batch = batch or scene.batch(only, released)
        if (self.backend, self.device) == ("cuda", "cpu"):
            with pytest.MonkeyPatch.context() as patch:
                emulated.emulate(patch)
                out = cuda_decode.decode(q, *scene.caches, batch, TIER, Scoring(**scoring))
        else:
            out = ops.decode(q, *scene.caches, batch, TIER, **scoring, backend=self.backend)
        assert out.dtype == q.dtype
        return out

    def check(self, codec: str, v: str | None = None, *, seed: int = 0, **given: Any) -> None:
        """Attend in a scene and judge the output; given: its shape, and the scoring."""
        shape = {name: given.pop(name) for name in list(given) if name not in SCORING}
        built = self.scene(codec, v, seed=seed, **shape)
        check_output(built, self.attend(built, **given), **given)

    @contextmanager
    def chunks_of(self, tokens: int, most: int) -> Iterator[None]:
        """Sequences are cut into chunks of so many tokens, or longer ones, but at most so many."""
        with pytest.MonkeyPatch.context() as patch:
            if self.backend == "triton":
                shape = {"tokens": max(16, tokens // 4), "warps": 1, "stages": 2, "programs": 8}
                config = tiles.Config(**shape, chunk=tokens, smallest=tokens, max_chunks=most)
                patch.setattr(tiles, "pick", lambda *_, **__: config)
            else:
                for name in emulated.CHUNK_SIZES:
                    patch.setattr(items, name, tokens)
                patch.setattr(items, "MOST_CHUNKS", most)
            yield


_NO_INTERPRETER = unavailable("cpu")
_NO_CUDA = module.unavailable("cuda")
_TRITON = TRITON_CODECS, TRITON_HEAD_DIMS, 2 * tiles.SMALLEST_CHUNK
_CUDA = tuple(formats.TYPES), CUDA_HEAD_DIMS, items.ALONE

INTERPRETED = Place(
    *("triton", "cpu", *_TRITON),
    marks=(pytest.mark.skipif(_NO_INTERPRETER is not None, reason=str(_NO_INTERPRETER)),),
)
TRITON = Place(
    *("triton", "cuda", *_TRITON),
    marks=(
        pytest.mark.gpu,
        pytest.mark.skipif(_NO_INTERPRETER is None, reason="Triton's interpreter is on"),
    ),
)
EMULATED = Place("cuda", "cpu", *_CUDA, marks=(needs_compiler,))
CUDA = Place(
    *("cuda", "cuda", *_CUDA),
    marks=(pytest.mark.gpu, pytest.mark.skipif(_NO_CUDA is not None, reason=str(_NO_CUDA))),
)
ON_CPU = INTERPRETED, EMULATED
ON_GPU = TRITON, CUDA
TRITONS = INTERPRETED, TRITON
CUDAS = EMULATED, CUDA
EVERYWHERE = *ON_CPU, *ON_GPU

# A codec of each way in which kernels treat scales: none, one a row, one a block, two, rotated.
KINDS = ("bf16", "fp8", "q4_0", "nvfp4", "iso3")


def each_place(places: Iterable[Place] = EVERYWHERE) -> Mark:
    """Run a test in each place."""
    return pytest.mark.parametrize(
        "place", [pytest.param(place, marks=place.marks, id=str(place)) for place in places]
    )


def each_codec(
    codecs: Collection[str] = kvq_codecs.names(),
    places: Iterable[Place] = EVERYWHERE,
    on_gpu: Collection[str] = (),
) -> Mark:
    """Run a test in each place with each of the codecs that its backend has kernels for.

    `on_gpu`: further codecs, for which the interpreter would take long.
    """
    return pytest.mark.parametrize(
        ("codec", "place"),
        [
            pytest.param(codec, place, marks=place.marks, id=f"{codec}-{place}")
            for codec in (*codecs, *on_gpu)
            for place in places
            if codec in place.codecs and (codec in codecs or place is not INTERPRETED)
        ],
    )
