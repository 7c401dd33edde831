"""`kvq plan` as its users run it."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from published import CONFIGS
from typer.testing import CliRunner

from kvq_cli.evaluation import evidence
from kvq_cli.main import app


@pytest.fixture
def config(tmp_path):
    """Write a published model's config.json; returns its path."""

    def write(name: str, **changes: Any) -> str:
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(CONFIGS[name] | changes))
        return str(path)

    return write


def plan(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"})


def planned(*arguments: str) -> dict[str, Any]:
    done = plan(*arguments, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def by_format(found: dict[str, Any], key: str) -> dict[str, Any]:
    return {row["format"]: row[key] for row in found["formats"]}


def test_the_35b_hybrids_bytes_a_token(config):
    found = planned("--config", config("qwen3.5-35b-a3b"), "--budget", "24GiB")
    expected = {
        "bf16": 20480, "q8_0": 10880, "fp8": 10400, "q6_0": 8320, "nvfp4": 5920, "q4_0": 5760,
        "iso4": 5280, "iso3": 4000, "k=q8_0,v=q4_0": 8320,
    }  # fmt: skip
    assert expected.items() <= by_format(found, "token_bytes").items()
    assert found["model"]["cached_layers"] == list(range(3, 40, 4))


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [("1", {"bf16": 25344, "fp8": 13248, "nvfp4": 7872}),
     ("2", {"bf16": 13056, "fp8": 7008, "nvfp4": 4320})],
)  # fmt: skip
def test_qsas_bytes_a_token_on_one_rank_and_on_two(config, ranks, expected):
    found = planned("--config", config("qwen4-exp"), "--budget", "24GiB", "--tp", ranks)
    assert expected.items() <= by_format(found, "token_bytes").items()
    assert (found["ranks"], found["page_tokens"]) == (int(ranks), 64)


def test_latent_rows(config):
    found = planned("--config", config("deepseek-v3"), "--budget", "24GiB")
    expected = {"bf16": 61 * 1152, "fp8": 61 * 580, "nvfp4": 61 * 328}
    assert expected.items() <= by_format(found, "token_bytes").items()
    assert not any("=" in row["format"] for row in found["formats"])


def test_f61_the_table_of_gib_comes_from_bytes_a_token(config):
    """A capacity kind: figures copied by hand from another row or column."""
    found = planned("--config", config("qwen3.5-35b-a3b"), "--budget", "24GiB")
    price = by_format(found, "token_bytes")
    gib = {codec: round(price[codec] * 160_000 / 2**30, 2) for codec in price}
    assert {"q4_0": 0.86, "q6_0": 1.24, "q8_0": 1.62, "bf16": 3.05}.items() <= gib.items()
    per_gib = by_format(found, "tokens_per_gib")
    assert all(per_gib[codec] == int(2**30 // price[codec]) for codec in price)
    # and the other way: the budget of that table, workspace and states aside, holds those tokens
    exact = 160_000 * 5760 + 16 * 5760  # the padding page
    states = by_format(found, "state_bytes")["q4_0"], by_format(found, "snapshot_bytes")["q4_0"]
    assert states[0] == states[1] > 0  # as many snapshots as requests run at once
    held = planned(
        "--config", config("qwen3.5-35b-a3b"), "--workspace", "1", "--kv-cache-dtype", "q4_0",
        "--budget", str(exact + sum(states) + 1),
    )  # fmt: skip
    assert by_format(held, "tokens")["q4_0"] == 160_000


def test_all_terms_fit_the_budget_and_one_more_page_does_not(config):
    for name in ("llama-3.1-8b", "gpt-oss-20b", "qwen3.5-35b-a3b", "deepseek-v3.2", "qwen4-exp"):
        found = planned("--config", config(name), "--budget", "16GiB")
        for row in found["formats"]:
            states = row["state_bytes"] + row["snapshot_bytes"]
            fixed = row["fixed_bytes"] + states + row["workspace_bytes"]
            total = fixed + row["tokens"] * row["token_bytes"]
            page = found["page_tokens"] * row["token_bytes"]
            assert total <= 16 * 2**30 < total + page


def test_what_no_kernel_serves_leaves_room_for_the_reference(config):
    """It decodes a request's whole context, as `kvq serve` knows."""

    def bytes_of(*how: str, **changes: Any) -> int:
        found = planned("--config", config("llama-3.1-8b", **changes), "--budget", "40GiB", *how)
        return int(by_format(found, "workspace_bytes")["q4_0"])

    assert bytes_of() == bytes_of("--page-tokens", "128") < 1 << 30
    assert bytes_of("--page-tokens", "8") > 4 << 30
    assert bytes_of(head_dim=160) > 4 << 30


def test_snapshots_of_states_are_priced_where_a_model_has_states(config):
    hybrid = "--config", config("qwen3.5-35b-a3b"), "--budget", "16GiB"
    bytes_of = {
        count: by_format(planned(*hybrid, "--state-snapshots", count), "snapshot_bytes")["q4_0"]
        for count in ("0", "1", "40")
    }
    assert bytes_of["0"] == 0 < bytes_of["1"] and bytes_of["40"] == 40 * bytes_of["1"]
    assert " states " in plan(*hybrid).stdout and " snapshots " in plan(*hybrid).stdout
    other = "--config", config("llama-3.1-8b"), "--budget", "16GiB"
    assert set(by_format(planned(*other), "snapshot_bytes").values()) == {0}
    assert " snapshots " not in plan(*other).stdout


def test_p100_the_plan_says_what_bf16_would_have_had(config):
    found = planned("--config", config("llama-3.1-8b"), "--budget", "8GiB")
    tokens = by_format(found, "tokens")
    for row in found["formats"]:
        assert row["tokens_of_bf16"] == tokens[row["format"]] / tokens["bf16"]
        assert row["token_bytes_of_bf16"] == row["token_bytes"] / (32 * 8 * 128 * 4)
    printed = plan("--config", config("llama-3.1-8b"), "--budget", "8GiB").stdout
    assert f"{tokens['bf16']:,}" in printed and f"{tokens['q4_0']:,}" in printed
    assert "× bf16" in printed and "of bf16" in printed


def test_lengths_requests_and_what_binds(config):
    found = planned(
        "--config", config("llama-3.1-8b"), "--budget", "16GiB", "--lengths", "8k,32ki,131072,1m"
    )
    q4 = next(row for row in found["formats"] if row["format"] == "q4_0")
    assert list(q4["requests"]) == ["8000", "32768", "131072", "1000000"]
    assert q4["requests"]["8000"] > q4["requests"]["32768"] > q4["requests"]["131072"] > 0
    assert q4["requests"]["1000000"] is None
    assert (q4["limit"], q4["longest_request"]) == ("positions", 131072)
    small = planned("--config", config("llama-3.1-8b"), "--budget", "1GiB")
    bf16 = next(row for row in small["formats"] if row["format"] == "bf16")
    assert bf16["limit"] == "memory" and bf16["longest_request"] <= bf16["tokens"]


def test_own_formats_come_last_and_once(config):
    found = planned(
        "--config", config("qwen3.5-35b-a3b"), "--budget", "8GiB", "--kv-cache-dtype", "q4_0",
        "--kv-cache-dtype", "3:bf16,4-:q4_0", "--kv-cache-dtype", "k=q4_0,v=q8_0",
    )  # fmt: skip
    names = [row["format"] for row in found["formats"]]
    assert names[-2:] == ["3:bf16,7-39:q4_0", "k=q4_0,v=q8_0"] and names.count("q4_0") == 1
    assert by_format(found, "token_bytes")["3:bf16,7-39:q4_0"] == 2048 + 9 * 576


def test_tiers_pages_and_waste_are_printed(config):
    done = plan("--config", config("gpt-oss-20b"), "--budget", "4GiB", "--lengths", "8000")
    assert done.exit_code == 0
    for words in ("token, full", "token, window", "page, window", "fixed", "workspace", "Waste"):
        assert words in done.stdout
    found = planned("--config", config("gpt-oss-20b"), "--budget", "4GiB", "--lengths", "8001")
    full, window = found["pages"]
    assert full == {"tier": "full", "page_tokens": 16, "waste": {"8001": 1 - 8001 / (501 * 16)}}
    assert window["tier"] == "window" and 0 < window["waste"]["8001"] < 0.2


def test_figures_are_never_cut_to_a_narrow_terminal(config, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    arguments = ["plan", "--config", config("gpt-oss-20b"), "--budget", "80GiB"]
    done = CliRunner().invoke(app, arguments)
    tokens = by_format(planned(*arguments[1:]), "tokens")
    assert "…" not in done.stdout and f"{tokens['q4_0']:,}" in done.stdout


def test_a_family_that_is_not_served_says_so(config):
    found = planned("--config", config("deepseek-v3"), "--budget", "24GiB")
    assert len(found["notes"]) == 1 and "not yet served" in found["notes"][0]
    assert planned("--config", config("llama-3.1-8b"), "--budget", "8GiB")["notes"] == []
    gemma = planned("--config", config("gemma-3-4b"), "--budget", "8GiB")
    assert any("iso3 is known to ruin Gemma 3" in note for note in gemma["notes"])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--budget", "8"], "holds no cache in any format"),
        (["--budget", "8G"], "'8G' is no number of bytes"),
        (["--budget", "8GiB", "--lengths", "8q"], "'8q' is no number of tokens"),
        (["--budget", "8GiB", "--tp", "3"], "neither be divided among 3 ranks"),
        (["--budget", "8GiB", "--kv-cache-dtype", "q5"], "cache dtype 'q5'"),
        (["--budget", "8GiB", "--kv-cache-dtype", "0-3:q4_0"], "layers 4-31 have no format"),
        (["--budget", "8GiB", "--workspace", "x"], "'x' is no number of bytes"),
        (["--budget", "8GiB", "--plot", "/no/such/place.svg"], "cannot be written"),
        (["--budget", "8GiB", "--page-tokens", "0"], "page-tokens"),
        (["--budget", "8GiB", "demo"], "give one model"),
        ([], "Missing option '--budget'"),
    ],
)
def test_wrong_input_ends_with_a_message_and_code_2(config, arguments, complaint):
    done = plan("--config", config("llama-3.1-8b"), *arguments)
    assert done.exit_code == 2
    assert complaint in " ".join(done.stderr.split())
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[]", "holds a JSON list"),
        ("{", "is not JSON"),
        ("{}", "names no model_type"),
        ('{"model_type": "gpt2"}', "has not been proved"),
        ('{"model_type": "llama", "num_hidden_layers": "32"}', "num_hidden_layers must be"),
        ('{"model_type": "llama", "num_hidden_layers": 0}', "must be a whole number ≥ 1, got 0"),
        ('{"model_type": "qwen2", "layer_types": ["full_attention"]}', "names 1 layers"),
        ('{"model_type": "glm_moe_dsa", "indexer_types": ["shared"]}', "indexer_types must say"),
        ('{"model_type": "qwen4_exp"}', "needs indexer_head_dim"),
        ('{"a": ' * 100_000, "nested too deeply"),
        ('{"model_type": "gemma3", "text_config": "x"}', "text_config must be an object"),
        ('{"model_type": "gemma3", "text_config": null}', "got null"),
        ('{"model_type": "gemma4_text", "per_layer_config": {"5": 1}}', "per_layer_config must"),
        ('{"model_type": "gemma4_text", "per_layer_config": [1]}', "per_layer_config must"),
        (
            '{"model_type": "gemma4_text", "per_layer_config": {"5": {"head_dim": "x"}}}',
            'head_dim must be a whole number ≥ 1, got "x"',
        ),
        (
            '{"model_type": "gemma4_text", "per_layer_config": {"5": {"head_dim": 64}, "11": {}}}',
            "one shape is supported",
        ),
        ('{"model_type": "gemma4_text", "num_kv_shared_layers": -1}', "number ≥ 0, got -1"),
        ('{"model_type": "gemma4_text", "num_kv_shared_layers": 30}', "less than the 30 layers"),
        ('{"model_type": "qwen3", "layer_types": "full_attention"}', "must be a list"),
        ('{"model_type": "llama", "intermediate_size": true}', "intermediate_size must be"),
        ('{"model_type": "llama", "intermediate_size": "x"}', 'number ≥ 0, got "x"'),
        ('{"model_type": "llama", "max_position_embeddings": 1e99}', "got 1e+99"),
        ('{"model_type": "llama", "num_attention_heads": 5000}', "num_attention_heads 5000"),
        (f'{{"model_type": "llama", "num_attention_heads": {10**30}}}', "num_attention_heads must"),
        ('{"model_type": "llama", "num_hidden_layers": 10001}', "at most 10,000, got 10001"),
    ],
)
def test_a_config_that_is_wrong_is_named(tmp_path, text, complaint):
    path = tmp_path / "config.json"
    path.write_text(text)
    done = plan("--config", str(path), "--budget", "8GiB")
    assert done.exit_code == 2 and complaint in " ".join(done.stderr.split())


def test_a_mark_at_the_beginning_of_a_config_is_no_matter(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["llama-3.1-8b"]), encoding="utf-8-sig")
    assert planned("--config", str(path), "--budget", "8GiB")["notes"] == []


def test_what_a_config_is_silent_on_is_said(tmp_path, config):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "hidden_size": 2048}')
    note = "taken from the family's defaults: num_hidden_layers 32, num_attention_heads 32"
    assert planned("--config", str(path), "--budget", "8GiB")["notes"] == [
        f"not in this config, {note}"
    ]
    assert note in plan("--config", str(path), "--budget", "8GiB").stdout
    multimodal = config("gemma-3-4b", text_config=CONFIGS["llama-3.1-8b"])
    assert planned("--config", multimodal, "--budget", "8GiB")["notes"] == []


def test_a_config_and_a_directory_in_each_others_place_say_where_they_belong(config, tmp_path):
    done = plan(config("llama-3.1-8b"), "--budget", "8GiB")
    assert done.exit_code == 2 and "give it with --config" in done.stderr
    done = plan("--config", str(tmp_path), "--budget", "8GiB")
    assert done.exit_code == 2 and "without --config" in done.stderr


def test_lengths_beyond_the_model_waste_nothing(config):
    found = planned("--config", config("llama-3.1-8b"), "--budget", "16GiB", "--lengths", "8k,1m")
    assert found["pages"][0]["waste"] == {"8000": 0.0, "1000000": None}


def test_a_name_steers_no_terminal_and_breaks_no_drawing(tmp_path):
    path, file = tmp_path / "\x1b[31mred\x07.json", tmp_path / "out.svg"
    path.write_text(json.dumps(CONFIGS["llama-3.1-8b"]))
    done = plan("--config", str(path), "--budget", "8GiB", "--plot", str(file))
    assert done.exit_code == 0 and "red" in done.stdout
    assert "\x1b" not in done.stdout and "\x07" not in done.stdout
    ET.fromstring(file.read_text())


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_reader_that_leaves_is_no_error(config, more):
    command = [sys.executable, "-m", "kvq_cli", "plan", "--budget", "8GiB", *more]
    with subprocess.Popen(
        [*command, "--config", config("llama-3.1-8b")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        assert running.stdout is not None and running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == ""


def test_models_are_found_as_serve_finds_them_and_need_no_weights(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(CONFIGS["llama-3.1-8b"]))
    assert planned(str(tmp_path / "mine"), "--budget", "8GiB")["model"]["name"] == "mine"
    for wrong in (str(tmp_path), "no/such-model", str(tmp_path / "none.gguf")):
        done = plan(wrong, "--budget", "8GiB")
        assert done.exit_code == 2 and "error:" in done.stderr


def test_the_demo_model(smollm2_gguf):
    found = planned(str(smollm2_gguf), "--budget", "1GiB")
    assert found["model"]["model_type"] == "llama"
    assert by_format(found, "token_bytes") == by_format(
        planned("demo", "--budget", "1GiB"), "token_bytes"
    )
    assert by_format(found, "token_bytes")["q8_0"] == 30 * 3 * 68 * 2


def test_the_plot_is_svg_with_a_bar_and_a_label_for_each_format(config, tmp_path):
    file = tmp_path / "out.svg"
    arguments = ["--config", config("qwen3.5-35b-a3b"), "--budget", "8GiB", "--plot", str(file)]
    found = planned(*arguments)
    drawing = ET.fromstring(file.read_text())
    space = "{http://www.w3.org/2000/svg}"
    words = [element.text for element in drawing.iter(f"{space}text")]
    assert {row["format"] for row in found["formats"]} <= set(words)
    tokens = by_format(found, "tokens")
    bars = [e for e in drawing.iter(f"{space}rect") if e.get("fill") != "#ffffff"]
    widths = [float(bar.get("width", 0)) for bar in bars]
    largest = max(tokens.values())
    assert len(bars) == len(tokens)
    for width, held in zip(widths, tokens.values(), strict=True):
        assert width == pytest.approx(max(widths) * held / largest, abs=0.1)
    assert f"{tokens['q4_0']:,}  ({tokens['q4_0'] / tokens['bf16']:.2f} × bf16)" in words
    first = file.read_bytes()
    planned(*arguments)
    assert file.read_bytes() == first


IMPORTS = """
import sys
from kvq_cli.evaluation import evidence
from kvq_cli.main import app
app(sys.argv[1:], standalone_mode=False)
heavy = [m for m in ("torch", "transformers", "fastapi", "kvq_attention") if m in sys.modules]
print(*heavy, file=sys.stderr)
"""


@pytest.mark.parametrize("what", ["config", "gguf"])
def test_planning_imports_no_model_library(what, config, smollm2_gguf, tmp_path):
    model = ["--config", config("gpt-oss-20b")] if what == "config" else [str(smollm2_gguf)]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, "plan", *model, "--budget", "4GiB",
         "--plot", str(tmp_path / "out.svg")],
        capture_output=True, check=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stderr.strip() == "" and "tokens of KV cache in 4 GiB" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 160
    assert Path(tmp_path / "out.svg").is_file()


def test_what_was_measured_of_a_model_stands_beside_what_fits(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama-3.1-8b"]))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    unmeasured = planned(str(tmp_path), "--budget", "8GiB")
    assert unmeasured["evaluated_on"] is None
    assert set(by_format(unmeasured, "kl_mean").values()) == {None}
    kl = {"fp32": 0.0, "q8_0": 0.001, "q4_0": 0.7, "0-1:bf16,2-31:q4_0": 0.05}
    sizes = by_format(unmeasured, "token_bytes") | {"0-1:bf16,2-31:q4_0": 43008}
    rows = [
        {"format": name, "bytes_per_token": sizes[name], "kl_mean": each, "top1_agreement": 0.9}
        for name, each in kl.items()
    ]
    text = {"name": "novel", "tokens": 4096}
    assert evidence.keep(tmp_path, {"kind": "kvq eval", "text": text, "rows": rows})

    found = planned(str(tmp_path), "--budget", "8GiB")
    assert found["evaluated_on"] == "4,096 tokens of novel"
    assert kl.items() <= by_format(found, "kl_mean").items()
    assert by_format(found, "kl_mean")["nvfp4"] is None
    (note,) = [note for note in found["notes"] if "ruins" in note]
    assert "q4_0 ruins this model" in note and "safer: 0-1:bf16,2-31:q4_0" in note
    shown = plan(str(tmp_path), "--budget", "8GiB").output
    assert "measured by kvq eval on 4,096 tokens of novel" in shown
    assert "What it does to the model" not in plan("demo", "--budget", "1GiB").output


def test_a_kept_file_that_is_not_quite_right_costs_no_plan_and_is_named(tmp_path, evaluations):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama-3.1-8b"]))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    row = {"format": "q8_0", "bytes_per_token": 9, "kl_mean": 0.01, "top1_agreement": 0.9}
    other = row | {"format": "q5_9"}
    text = {"name": "novel", "tokens": 4096}
    evidence.keep(tmp_path, {"kind": "kvq eval", "text": text, "rows": [row, other]})
    (file,) = evaluations.iterdir()
    found = planned(str(tmp_path), "--budget", "8GiB")
    assert by_format(found, "kl_mean")["q8_0"] == 0.01
    assert f"{file} holds a format that this kvq does not know; the rest is used" in found["notes"]
    for content in (json.dumps(row), file.read_text().replace("0.01", "null"), "[" * 100_000):
        file.write_text(content)
        found = planned(str(tmp_path), "--budget", "8GiB")
        assert found["evaluated_on"] is None
        assert any(str(file) in note and "ignored" in note for note in found["notes"])
