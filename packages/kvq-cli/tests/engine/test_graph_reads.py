"""No step that a graph is captured of waits for the device: models of all families, without one."""

import pytest
import torch
from graph_captures import capture_here
from host_reads import HostReads
from tiny_families import FAMILIES, tiny
from tiny_models import make_engine

from kvq_attention import ops
from kvq_cli.models import rotary


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch):
    """Those that serve a GPU are captured in kvq-attention's tests; the reference reads a batch."""
    monkeypatch.setattr(ops, "store", lambda *_, **__: None)
    monkeypatch.setattr(ops, "decode", lambda q, *_, **__: torch.zeros_like(q))
    monkeypatch.setattr(ops, "extend", lambda q, *_, **__: torch.zeros_like(q))


def captured(model):
    """What is read as graphs of decodes and, where there are any, of prompts are made."""
    reads = HostReads()

    def capture(run):
        with reads:
            run()
        return capture_here(run)

    linear = any(type(module).__name__.endswith("GatedDeltaNet") for module in model.modules())
    engine = make_engine(
        model, page_tokens=16, cuda_graph_max_bs=2, cuda_graph_max_prefill_tokens=0 if linear else 8
    )
    engine.runner._capture = lambda: capture
    assert engine.runner.prepare() == (2, 0 if linear else 1)
    return reads.found


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_every_family_can_be_captured(family):
    assert captured(tiny(family)) == []


def test_reads_of_the_host_are_found(monkeypatch):
    """Those of transformers' dynamic frequencies, where nobody settles them."""
    scaling = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    assert captured(tiny("llama", rope_parameters=scaling)) == []
    monkeypatch.setattr(rotary, "settle", lambda *_: None)
    assert "is_nonzero.default" in captured(tiny("llama", rope_parameters=scaling))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.max().item(),
        lambda x: bool((x > 0).any()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: x.repeat_interleave(torch.ones(len(x), dtype=torch.int64)),
    ],
)
def test_each_kind_of_read_is_known(read):
    with HostReads() as reads:
        read(torch.arange(4))
    assert reads.found
    with HostReads() as reads:
        torch.arange(4)[torch.tensor([1, 2])].repeat_interleave(2).cumsum(0)
    assert not reads.found
