"""A model whose small parts are compiled computes what it computed before."""

import sys

import pytest
import torch
from tiny_models import gemma, greedy, llama, make_engine, random_prompt, run

from kvq_cli.config import ConfigError
from kvq_cli.models.compiled import ROTARY, compile_parts

WORK = {name: (random_prompt(5 + 6 * i), greedy(12)) for i, name in enumerate("abcd")}


@pytest.fixture(autouse=True)
def rotary_stays(monkeypatch):
    """The function that is replaced is other tests', too."""
    for make in (llama, gemma):
        module = sys.modules[type(make()).__module__]
        monkeypatch.setattr(module, ROTARY, getattr(module, ROTARY))
    torch._dynamo.reset()


@pytest.mark.parametrize(("make", "parts"), [(llama, 2 * 3 + 1), (gemma, 4 * 7 + 1)])
def test_compiled_parts_give_the_same_tokens_for_any_number_of_rows(make, parts):
    """By torch's own tracing, without a compiler; each part is traced a few times at most."""
    model = make(head_dim=64)
    expected = run(make_engine(model), WORK)
    traced = []

    def backend(graph, _):
        traced.append(graph)
        return graph.forward

    assert compile_parts(model, backend) == parts
    assert run(make_engine(model), WORK) == expected
    assert 4 <= len(traced) <= 14, "rows are no constants"


def test_what_cannot_be_compiled_is_said_before_anything_is_computed():
    model = llama()

    def none_here(graph, inputs):
        raise RuntimeError("no C++ compiler\nwhatsoever")

    with pytest.raises(ConfigError, match=r"--compile needs torch.compile.*no C\+\+ compiler"):
        compile_parts(model, none_here)
    assert not any("forward" in vars(module) for module in model.modules()), "all as they were"


def test_a_model_is_compiled_once():
    model = llama()
    compile_parts(model, "eager")
    rotary = getattr(sys.modules[type(model).__module__], ROTARY)
    compile_parts(llama(), "eager")
    assert getattr(sys.modules[type(model).__module__], ROTARY) is rotary


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own, which differ by release and GPU
@pytest.mark.parametrize("make", [llama, gemma])
def test_compiled_kernels_give_the_same_logits(make):
    torch.manual_seed(0)
    model = make(head_dim=64).to("cuda")
    ids = torch.randint(1, 90, (1, 40), device="cuda")
    with torch.inference_mode():
        expected = model(ids).logits
        compile_parts(model)
        for rows in (1, 2, 40):
            found = model(ids[:, :rows]).logits
            torch.testing.assert_close(found, expected[:, :rows], rtol=1e-4, atol=1e-4)
