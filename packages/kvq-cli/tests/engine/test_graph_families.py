"""What graphs give is what steps without them give: models of all families on a GPU."""

import pytest
import torch
from engine_tolerances import LEAST_COSINE
from graph_captures import PLACES
from tiny_families import FAMILIES, tiny
from tiny_models import greedy, make_engine, random_prompt, run


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_replays_steps_of_every_family(family):
    """In bfloat16, as a GPU serves: decodes, and chunks but of linear attention."""
    device, backends = PLACES[1].values
    model = tiny(family, head_dim=64).to(device, torch.bfloat16)
    linear = "linear_attention" in (getattr(model.config, "layer_types", None) or ())
    engine = make_engine(
        model,
        cuda_graph_max_bs=4,
        cuda_graph_max_prefill_tokens=0 if linear else 32,
        max_prefill_tokens=32,
        page_tokens=16,
        num_pages=32,
        cache="q8_0",
        backends=backends,
    )
    runner, found, forward = engine.runner, [], engine.runner.forward
    assert runner.prepare() == (3, 0 if linear else 2)

    @torch.inference_mode()
    def both(step):
        """The step replayed, and then again without graphs, which is what counts."""
        replayed = runner._replayed(step)
        chunk = len(step.extends) == 1 and not step.decodes
        assert (replayed is not None) == (not step.extends or (chunk and not linear))
        kept = None if replayed is None else replayed.float().clone()
        most = runner._graph_rows, runner._graph_tokens
        runner._graph_rows = runner._graph_tokens = 0
        eager = forward(step)
        runner._graph_rows, runner._graph_tokens = most
        if kept is not None:
            found.append(torch.nn.functional.cosine_similarity(kept, eager.float()).min().item())
        return eager

    runner.forward, engine.computing._goes_on = both, lambda step: False
    run(engine, {"first": (random_prompt(9), greedy(3))})
    for n in range(3):
        engine.add(f"{n}", random_prompt(30, n), greedy(5 + n))
        engine.step()
    while engine.has_work:
        engine.step()
    assert len(found) >= 6 and min(found) > LEAST_COSINE, found
