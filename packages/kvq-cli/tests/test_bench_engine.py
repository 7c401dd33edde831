"""`kvq bench engine`: the step that is timed is the one that was asked for."""

import json
from dataclasses import replace

import pytest
import torch
from tiny_families import FAMILIES, tiny
from transformers import LlamaConfig
from typer.testing import CliRunner

from kvq_attention.bench.cases import Extend
from kvq_cli import cgroups, machine
from kvq_cli.benching import engines, peer, session
from kvq_cli.benching.plan import EnginePlan, RandomModel, parse_steps
from kvq_cli.config import ConfigError
from kvq_cli.engine.runner import ModelRunner
from kvq_cli.main import app
from kvq_cli.models import attention
from kvq_cli.plots import bar_chart

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = "1x64x64"
CASES = parse_steps("3x40,24+32")


@pytest.fixture(scope="module")
def plan():
    model = RandomModel.parse(TINY, "4/2x64")
    return EnginePlan(model, ("q8_0",), CASES, device="cpu", repeat=2)


def test_cases_are_read_as_they_are_written():
    assert [case.name for case in parse_steps("1x1000,64x32k,2k+8k,1x1000")] == [
        "1x1000",
        "64x32k",
        "2k+8k",
    ]


def test_the_timed_steps_have_the_tokens_of_their_case(plan, monkeypatch):
    model, steps = engines.make_model(plan), []

    def noted(runner, step):
        steps.append([(r.num_computed, count) for r, count in step.work])
        return forward(runner, step)

    forward = ModelRunner.forward
    monkeypatch.setattr(ModelRunner, "forward", noted)
    decode, extend = CASES
    engine = engines.make_engine(model, plan, "q8_0", decode)
    engines.about_to_decode(engine, decode, 4)
    assert not steps, "prompts are not computed"
    engine.step()
    assert steps.pop() == [(40, 1)] * 3
    engine = engines.make_engine(model, plan, "q8_0", extend)
    engines.about_to_extend(engine, extend)
    assert not steps
    engine.step()
    assert steps.pop() == [(32, 24)]


@pytest.mark.parametrize(("tokens", "measured"), [(None, [CASES[1]]), (0, [])])
def test_prompts_that_are_replayed_are_found_as_served(tokens, measured, monkeypatch):
    given = EnginePlan(RandomModel.parse(TINY, "4/2x64"), ("q8_0",), CASES, device="cpu", repeat=1)
    plan, calls = replace(given, graph_tokens=tokens), []
    model = engines.make_model(plan)
    for case in CASES:
        monkeypatch.setattr(ModelRunner, "narrow_prompts", lambda _, case=case: calls.append(case))
        engines.make_engine(model, plan, "q8_0", case)
    assert calls == measured
    record = session.run(plan, "kvq bench engine", lambda *_: None)
    assert ("prompts without graphs" in record["title"]) == (tokens == 0)


def test_an_engine_allows_requests_as_long_as_asked(plan):
    """Whose cache holds one of them, and which a random model was made for."""
    asked = replace(plan, max_model_len=1000)
    model = engines.make_model(asked)
    assert model.config.max_position_embeddings == 1000
    decode, extend = CASES
    for case, own in ((decode, 40), (extend, 56)):
        engine = engines.make_engine(model, asked, "q8_0", case)
        assert engine.max_model_len == 1000
        assert engine.cache.num_tokens >= 1000
        assert own <= engines.make_engine(model, plan, "q8_0", case).max_model_len < 100
    many = replace(plan, max_model_len=60)
    held = engines.make_engine(model, many, "q8_0", decode).cache.num_tokens
    assert held >= 3 * 40, "all requests of a case, not one of the longest alone"
    assert session.run(asked, "", lambda *_: None)["rows"]


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_all_families_are_measured(family, monkeypatch):
    model = tiny(family)
    attention.install(model)
    monkeypatch.setattr(session, "make_model", lambda _: model)
    cases = parse_steps("2x20,8+16,8+0")
    plan = EnginePlan("tiny", ("bf16",), cases, device="cpu", repeat=1)
    record = session.run(plan, "kvq bench engine tiny", lambda *_: None)
    assert [row["case"] for row in record["rows"]] == ["2x20", "8+16", "8+0"]
    assert all(row["alone_ms"] > 0 and row["step_ms"] > 0 for row in record["rows"])


def test_the_command_records_what_it_measured(tmp_path):
    path = tmp_path / "record.json"
    given = ["--random", TINY, "--shape", "4/2x64", "--kv-cache-dtype", "bf16,q4_0"]
    given += ["--cases", "2x20,16+16", "--repeat", "2", "--device", "cpu", "--json", str(path)]
    given += ["--max-model-len", "100"]
    result = CliRunner().invoke(app, ["bench", "engine", *given])
    assert result.exit_code == 0, result.output
    record = json.loads(path.read_text())
    assert [(row["case"], row["cache"]) for row in record["rows"]] == [
        (case, cache) for case in ("2x20", "16+16") for cache in ("bf16", "q4_0")
    ]
    for row in record["rows"]:
        assert row["backend"] == "reference" and not row["graphs"]
        assert 0 < row["p10_ms"] <= row["step_ms"] <= row["p90_ms"]
        tokens = 2 if row["case"] == "2x20" else 16
        assert row["tokens_per_s"] == pytest.approx(tokens / row["step_ms"] * 1e3, rel=0.01)
    assert f"--random {TINY}" in record["command"] and "2x20,16+16" in record["command"]
    assert record["command"].endswith("--max-model-len 100")
    assert "steps 2x20" in result.output


def test_the_same_steps_compiled_and_beside_transformers_own(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr("kvq_cli.benching.session.compile_parts", compiled.append)
    path = tmp_path / "record.json"
    given = ["--random", TINY, "--shape", "4/2x16", "--device", "cpu", "--dtype", "float32"]
    given += ["--kv-cache-dtype", "fp32", "--cases", "2x20,16+0,16+16", "--repeat", "1"]
    result = CliRunner().invoke(
        app, ["bench", "engine", *given, "--compile", "--peer", "--json", str(path)]
    )
    assert result.exit_code == 0, result.output
    record = json.loads(path.read_text())
    decode, prompt, chunk = record["rows"]
    for row, tokens in ((decode, 2), (prompt, 16)):
        rate = tokens / row["transformers_ms"] * 1e3
        assert row["transformers_tokens_per_s"] == pytest.approx(rate, rel=0.01) and rate > 0
    assert chunk["transformers_ms"] is chunk["transformers_tokens_per_s"] is None
    assert bar_chart(record).count("transformers tokens per s") == 1
    assert len(compiled) == 1 and record["title"].startswith("Steps of the engine, compiled")
    assert record["command"].endswith("--compile --peer")


def test_a_run_cut_off_leaves_what_it_measured(tmp_path, monkeypatch):
    def cut(model, plan, cache, case):
        if cache == "q4_0":
            raise KeyboardInterrupt
        return make(model, plan, cache, case)

    make = engines.make_engine
    monkeypatch.setattr("kvq_cli.benching.session.make_engine", cut)
    path, plot = tmp_path / "record.json", tmp_path / "plot.svg"
    given = ["--random", TINY, "--shape", "4/2x64", "--device", "cpu", "--cases", "2x20"]
    given += ["--repeat", "1", "--json", str(path), "--plot", str(plot)]
    result = CliRunner().invoke(app, ["bench", "engine", *given])
    assert [row["cache"] for row in json.loads(path.read_text())["rows"]] == ["bf16", "q8_0"]
    assert result.exit_code == 130 and "interrupted" in result.output
    assert "steps 2x20" in result.output and "q8_0" in plot.read_text()


def test_transformers_own_steps_have_the_tokens_of_their_case(plan):
    model, calls = engines.make_model(plan), []

    def noted(module, args, kwargs):
        calls.append((int(kwargs["position_ids"][0, 0]), tuple(kwargs["input_ids"].shape)))

    model.register_forward_pre_hook(noted, with_kwargs=True)
    peer.step_ms(model, CASES[0], repeat=1)
    short = [(0, (3, 40)), (40, (3, 1))]
    assert calls == [*short, *short, *((40 + n, (3, 1)) for n in range(1, peer.STEPS + 1)), *short]
    calls.clear()
    peer.step_ms(model, Extend(24, 0), repeat=2)
    assert calls == [(0, (1, 24)), (24, (1, 1)), (0, (1, 24)), (0, (1, 24))]
    calls.clear()
    assert peer.step_ms(model, CASES[1]) is None and not calls
    assert model.config._attn_implementation == attention.IMPLEMENTATION


def test_a_model_from_its_package_beside_transformers_own(tmp_path, smollm2_dir):
    path, pair = tmp_path / "record.json", "k=q8_0,v=q4_0"
    given = ["--device", "cpu", "--cases", "1x8,8+0", "--repeat", "1", "--peer"]
    given += ["--kv-cache-dtype", f"bf16,{pair}", "--json", str(path)]
    result = CliRunner().invoke(app, ["bench", "engine", "demo", *given])
    assert result.exit_code == 0, result.output
    record = json.loads(path.read_text())
    assert [(row["case"], row["cache"]) for row in record["rows"]] == [
        (case, cache) for case in ("1x8", "8+0") for cache in ("bf16", pair)
    ]
    assert all(row["transformers_tokens_per_s"] > 0 for row in record["rows"])
    assert record["title"].startswith("Steps of the engine, demo, ")


@pytest.mark.parametrize("model", [["demo"], ["--random", TINY]])
def test_what_a_model_cannot_store_is_refused_before_weights(model, monkeypatch):
    for read in ("load", "random_llama"):
        monkeypatch.setattr(engines, read, lambda *_, **__: pytest.fail("weights were read"))
    given = [*model, "--device", "cpu", "--kv-cache-dtype", "bf16,q9"]
    result = CliRunner().invoke(app, ["bench", "engine", *given])
    assert result.exit_code == 2 and "'q9': it is no format" in " ".join(result.output.split())


def test_on_a_gpu_a_model_computes_in_the_type_that_it_was_trained_in(plan, monkeypatch):
    config = LlamaConfig(dtype="float16")
    monkeypatch.setattr(machine, "free_bytes", lambda _: 1 << 30)
    for device, dtype in (("cuda", torch.float16), ("cpu", torch.float32)):
        assert engines.checked_dtype(plan, config, torch.device(device)) == dtype


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "give a MODEL or --random, one of them"),
        (["demo", "--random", TINY], "give a MODEL or --random, one of them"),
        (["--random", "4096"], "must be LAYERSxHIDDENxINNER"),
        (["--random", TINY, "--cases", "2k"], "must be BATCHxCONTEXT"),
        (["--random", TINY, "--device", "cpu", "--cuda-graph-max-bs", "4"], "asks for CUDA graphs"),
        (
            ["--random", TINY, "--shape", "4/2x63", "--device", "cpu"],
            "head_dim must be even, got 63",
        ),
        (
            ["--random", TINY, "--device", "cpu", "--cases", "1000000x1000000"],
            "1000000x1000000 in bf16 takes",
        ),
        (
            ["--random", TINY, "--device", "cpu", "--cases", "1x20", "--max-model-len", "20"],
            "tokens, those that steps add included, and --max-model-len allows 20; give more, a",
        ),
        (
            ["--random", TINY, "--device", "cpu", "--cases", "1x20", "--max-model-len", "9" * 12],
            "a smaller --max-model-len if one is given",
        ),
        (
            ["demo", "--device", "cpu", "--max-model-len", "0"],
            "Invalid value for '--max-model-len'",
        ),
        (
            ["demo", "--device", "cpu", "--cases", "1x20", "--max-model-len", "8193"],
            "max_model_len 8193 exceeds the 8192 positions the model was made for",
        ),
        (["--random", TINY, "--plot", "plot.png"], "must end in .svg, got 'plot.png'"),
    ],
)
def test_what_cannot_be_measured_is_refused(given, said):
    result = CliRunner().invoke(app, ["bench", "engine", *given])
    assert result.exit_code == 2 and said in " ".join(result.output.split())


def test_a_context_that_the_model_was_not_made_for_is_refused(smollm2_dir):
    """Decodes make it longer than the case says, by the steps that are timed and some more."""
    for case in ("1x8192", "1x8183", "4k+8k"):
        given = ["demo", "--device", "cpu", "--cases", case, "--repeat", "2"]
        result = CliRunner().invoke(app, ["bench", "engine", *given])
        assert result.exit_code == 2
        assert "the model was made for 8,192 positions" in " ".join(result.output.split())


def test_a_random_model_is_served_as_others_are(plan, monkeypatch):
    monkeypatch.setattr(cgroups, "cpus", lambda: 1.0)
    torch.set_num_threads(2)
    model = engines.make_model(plan)
    assert torch.get_num_threads() == 1, "a container's share counts"
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    with pytest.raises(ConfigError, match="LAYERSxHIDDENxINNER"):
        RandomModel.parse("0x64x64", "4/2x64")
