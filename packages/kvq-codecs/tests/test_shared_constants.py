"""Constants that calls share: of whatever mode, thread or tensor kind the first call was."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import array_api_compat.numpy
import array_api_compat.torch
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kvq_codecs
from kvq_codecs import bits

from .exact import assert_same

ROWS = np.random.default_rng(0).standard_normal((3, 128), np.float32)

each_name = pytest.mark.parametrize("name", kvq_codecs.names())


@pytest.fixture(autouse=True)
def no_constants_yet() -> None:
    bits._host_scalar.cache_clear()


def check(name: str) -> None:
    codec, want = kvq_codecs.get(name), kvq_codecs.get(name).encode(ROWS)
    encoded = codec.encode(torch.from_numpy(ROWS))
    for plane, items in want.planes.items():
        assert_same(encoded.planes[plane].numpy(), items, f"{name} {plane}")
    assert_same(codec.decode(encoded).numpy(), codec.decode(want), name)


@each_name
def test_first_use_in_inference_mode_leaves_normal_use_normal(name: str) -> None:
    with torch.inference_mode():
        check(name)
        constant = bits.scalar(array_api_compat.torch, torch.ones(1), 8.0)
    assert not constant.is_inference()
    assert bits.scalar(array_api_compat.torch, torch.ones(1), 8.0) is constant
    weight = torch.ones(3, requires_grad=True)
    (weight * constant).sum().backward()  # saves the constant, which an inference tensor forbids
    assert torch.equal(weight.grad, torch.full((3,), 8.0))
    check(name)


@each_name
def test_first_use_outside_serves_inference_mode(name: str) -> None:
    check(name)
    with torch.inference_mode():
        check(name)


@each_name
def test_a_trace_without_values_leaves_real_use_real(name: str) -> None:
    codec = kvq_codecs.get(name)
    with FakeTensorMode() as mode:
        rows = mode.from_tensor(torch.from_numpy(ROWS))
        assert codec.encode(rows).lead == (3,)
    check(name)
    with FakeTensorMode() as mode:
        assert codec.encode(mode.from_tensor(torch.from_numpy(ROWS))).lead == (3,)


@each_name
def test_threads_get_the_same_bytes(name: str) -> None:
    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(check, name) for _ in range(32)]:
            done.result()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_constant_is_exactly_the_one_asked_for(kind: str) -> None:
    if kind == "numpy":
        xp, like = array_api_compat.numpy, np.ones(1)
    else:
        xp, like = array_api_compat.torch, torch.ones(1)
    for value in (0.0, -0.0, 1, 1.0, np.float32(0.1), 0.1, float("nan"), float("-inf"), -0.0, 0.0):
        for dtype in ("float32", "float16"):
            got = bits.scalar(xp, like, value, dtype)
            assert_same(np.asarray(got), np.array(value, dtype), f"{value} as {dtype}")
    assert bits.scalar(xp, like, 0x7F7F0000, "int32") == 0x7F7F0000
