"""What launches are told of a cache is made once, and lives as long as the cache."""

import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kvq_codecs
from kvq_attention.triton.side import Side
from kvq_codecs import Encoded


def make_cache(name="q4_0"):
    spec = kvq_codecs.get(name).spec
    planes = {
        p.name: torch.zeros(3, 2, 4, p.row_items(128), dtype=getattr(torch, p.dtype))
        for p in spec.planes
    }
    return Encoded(spec, 128, planes)


@pytest.mark.parametrize("name", kvq_codecs.names())
def test_a_cache_has_one_side_for_queries_of_a_dtype(name):
    cache, other = make_cache(name), make_cache(name)
    side = Side.of(cache, torch.bfloat16)
    assert Side.of(cache, torch.bfloat16) is side
    assert Side.of(cache, torch.float16) is not side
    assert Side.of(cache, torch.bfloat16) is side
    assert Side.of(other, torch.bfloat16).tensors[0] is not side.tensors[0]
    stored = {plane.data_ptr() for plane in cache.planes.values()}
    assert {tensor.data_ptr() for tensor in side.tensors} <= stored


@pytest.mark.parametrize("name", kvq_codecs.names())
def test_planes_that_were_put_elsewhere_are_another_side(name):
    """Whoever moves a cache's memory under it is not served from where it was."""
    cache = make_cache(name)
    before = Side.of(cache, torch.bfloat16)
    for plane in cache.planes.values():
        plane.data = plane.clone()
    moved = Side.of(cache, torch.bfloat16)
    assert moved is not before
    stored = {plane.data_ptr() for plane in cache.planes.values()}
    assert {tensor.data_ptr() for tensor in moved.tensors} <= stored
    for plane in cache.planes.values():
        plane.data = plane.data.transpose(0, 2).contiguous().transpose(0, 2)
    assert Side.of(cache, torch.bfloat16).planes[0].strides != moved.planes[0].strides


def test_what_a_trace_makes_of_a_cache_is_not_kept():
    cache = make_cache("q4_0")
    with FakeTensorMode(allow_non_fake_inputs=True):
        Side.of(cache, torch.bfloat16)
    assert all(type(tensor) is torch.Tensor for tensor in Side.of(cache, torch.bfloat16).tensors)


@pytest.mark.parametrize("name", ["bf16", "q4_0", "nvfp4"])
def test_a_side_does_not_keep_the_memory_of_a_cache_that_is_gone(name):
    cache = make_cache(name)
    side = Side.of(cache, torch.bfloat16)
    kept = [weakref.ref(tensor.untyped_storage()) for tensor in side.tensors]
    kept += [weakref.ref(plane) for plane in cache.planes.values()]
    del side, cache
    assert not any(each() is not None for each in kept)
