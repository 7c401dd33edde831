"""Checks of a call's tensors: symbolic sizes, dtypes, one device. Nothing is read from a device."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvq_attention.errors import DeviceError, TensorError
from kvq_codecs import Encoded, get

# A step may have no tokens, and nothing may be left to copy.
MAY_BE_ZERO = ("T", "M")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(slots=True)
class Sizes:
    """The sizes of one call, by symbol: the first tensor that has one fixes it for the others.

    Attributes
    ----------
    sizes : symbol → (size, name of the tensor that fixed it)
    devices : device → names of the tensors on it
    """

    sizes: dict[str, tuple[int, str]] = field(default_factory=dict)
    devices: dict[torch.device, list[str]] = field(default_factory=dict)

    def __getitem__(self, symbol: str) -> int:
        return self.sizes[symbol][0]

    def tensor(
        self, name: str, tensor: object, axes: tuple[str, ...], dtypes: tuple[torch.dtype, ...]
    ) -> None:
        """Expect a strided tensor with these axes and one of these dtypes."""
        if not isinstance(tensor, torch.Tensor):
            raise TensorError(f"{name} must be a torch tensor, got {type(tensor).__name__}")
        if tensor.dtype not in dtypes:
            allowed = " or ".join(str(dtype) for dtype in dtypes)
            raise TensorError(f"{name} must be {allowed}, got {tensor.dtype}")
        _strided(name, tensor)
        self.shape(name, tuple(tensor.shape), axes)
        self.place(name, tensor)

    def cache(self, name: str, cache: object, axes: tuple[str, ...]) -> None:
        """Expect encoded rows of a pool whose shape, when decoded, has these axes."""
        if not isinstance(cache, Encoded):
            raise TensorError(
                f"{name} must be a kvq_codecs.Encoded view of a pool, got {type(cache).__name__}"
            )
        for plane, array in cache.planes.items():
            if not isinstance(array, torch.Tensor):
                raise TensorError(
                    f"plane {plane!r} of {name} must be a torch tensor, got "
                    f"{type(array).__name__}; {cache.spec.name} cannot be read without it"
                )
            _strided(f"{name}[{plane!r}]", array)
            self.place(f"{name}[{plane!r}]", array)
        if get(cache.spec.name).spec != cache.spec:
            raise TensorError(
                f"{name} holds rows of a {cache.spec.name} that is not the registered codec"
            )
        self.shape(name, cache.shape, axes)

    def shape(self, name: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> None:
        """Expect a shape with these axes."""
        if len(shape) != len(axes):
            raise TensorError(f"{name} must have axes [{', '.join(axes)}], got {list(shape)}")
        for axis, (symbol, size) in enumerate(zip(axes, shape, strict=True)):
            if size == 0 and symbol not in MAY_BE_ZERO:
                raise TensorError(
                    f"axis {axis} of {name} {list(shape)} is {symbol} = 0, it must be at least 1"
                )
            known, owner = self.sizes.setdefault(symbol, (size, name))
            if size != known:
                raise TensorError(
                    f"axis {axis} of {name} {list(shape)} is {symbol} = {size}, but {owner} has "
                    f"{symbol} = {known}"
                )

    def place(self, name: str, tensor: torch.Tensor) -> None:
        """Note where a tensor lies."""
        self.devices.setdefault(tensor.device, []).append(name)

    def one_device(self) -> torch.device:
        """The device of all tensors noted; `DeviceError` if there are several."""
        if len(self.devices) > 1:
            homes = "; ".join(f"{', '.join(n)} on {d}" for d, n in self.devices.items())
            raise DeviceError(f"all tensors of a call must lie on one device, got {homes}")
        return next(iter(self.devices))


def _strided(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided:
        raise TensorError(f"{name} must be dense, of layout torch.strided, got {tensor.layout}")


def check_rows(where: str, plane: torch.Tensor) -> None:
    """`TensorError` where the items of a row do not lie next to each other."""
    if plane.stride(3) != 1 and plane.shape[3] > 1:
        raise TensorError(
            f"{where}: the items of a row must lie next to each other, their stride is "
            f"{plane.stride(3)}; give a view whose last axis is contiguous"
        )
