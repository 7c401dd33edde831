"""`kvq bench engine`: the step that is timed is the one that was asked for."""

import json

import pytest
import torch
from typer.testing import CliRunner

from kvq_cli.benching import engines
from kvq_cli.benching.plan import EnginePlan, RandomModel, parse_steps
from kvq_cli.config import ConfigError
from kvq_cli.main import app

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

    from kvq_cli.engine.runner import ModelRunner

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


def test_the_command_records_what_it_measured(tmp_path):
    path = tmp_path / "record.json"
    given = ["--random", TINY, "--shape", "4/2x64", "--kv-cache-dtype", "bf16,q4_0"]
    given += ["--cases", "2x20,16+16", "--repeat", "2", "--device", "cpu", "--json", str(path)]
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
    assert "steps 2x20" in result.output


def test_the_same_steps_compiled_and_beside_transformers_own(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr("kvq_cli.benching.session.compile_parts", compiled.append)
    path = tmp_path / "record.json"
    given = ["--random", TINY, "--shape", "4/2x16", "--device", "cpu", "--dtype", "float32"]
    given += ["--kv-cache-dtype", "fp32", "--cases", "2x20,16+16", "--repeat", "1"]
    result = CliRunner().invoke(
        app, ["bench", "engine", *given, "--compile", "--peer", "--json", str(path)]
    )
    assert result.exit_code == 0, result.output
    record = json.loads(path.read_text())
    decode, chunk = record["rows"]
    assert decode["transformers_ms"] > 0 and chunk["transformers_ms"] is None
    assert len(compiled) == 1 and record["title"].startswith("Steps of the engine, compiled")
    assert record["command"].endswith("--compile --peer")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "give a MODEL or --random"),
        (["demo", "--random", TINY], "give a MODEL or --random"),
        (["--random", "4096"], "must be LAYERSxHIDDENxINNER"),
        (["--random", TINY, "--cases", "2k"], "must be BATCHxCONTEXT"),
        (["--random", TINY, "--device", "cpu", "--cuda-graph-max-bs", "4"], "asks for CUDA graphs"),
    ],
)
def test_what_cannot_be_measured_is_refused(given, said):
    result = CliRunner().invoke(app, ["bench", "engine", *given])
    assert result.exit_code == 2 and said in " ".join(result.output.split())


def test_a_random_model_is_served_as_others_are(plan):
    model = engines.make_model(plan)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    with pytest.raises(ConfigError, match="LAYERSxHIDDENxINNER"):
        RandomModel.parse("0x64x64", "4/2x64")
