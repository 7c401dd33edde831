"""`kvq check MODEL` as its users run it: every kernel of a model, without its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import gemma, llama
from transformers import GptOssConfig
from typer.testing import CliRunner

from kvq_attention import ops, reference, support
from kvq_cli.main import app
from kvq_cli.models import loader

ON_CPU = ("--device", "cpu")


def check(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["check", *arguments], env={"COLUMNS": "160"})


def checked(*arguments: str, code: int = 0) -> dict[str, Any]:
    done = check(*arguments, "--json")
    assert done.exit_code == code, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(autouse=True)
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are never read."""
    monkeypatch.setattr(loader, "_weights", lambda *_: pytest.fail("weights were loaded"))


def saved(directory: Path, config: Any) -> str:
    """A directory with a config.json and nothing else."""
    config.save_pretrained(directory)
    return str(directory)


@pytest.fixture
def gemma_dir(tmp_path: Path) -> str:
    return saved(tmp_path, gemma(head_dim=128).config)


def test_it_tries_each_op_format_and_kind_of_layer_once(gemma_dir: str) -> None:
    found = checked(gemma_dir, *ON_CPU)
    layers = [(row["op"], row["layer"]) for row in found["kernels"]]
    window, full = "2/1x128, pages of 16, window 24", "2/1x128, pages of 16"
    assert layers == [
        ("store", window), ("decode", window), ("extend", window), ("decode", full),
        ("extend", full),
    ]  # fmt: skip
    assert {(row["backend"], row["format"]) for row in found["kernels"]} == {("reference", "bf16")}
    assert found["agrees"] and found["problems"] == []
    assert found["launches"]["reference"] == {
        "store": 1, "decode": 2, "extend": 2, "copy_pages": 0,
    }  # fmt: skip
    assert (found["dtype"], found["page_tokens"]) == ("float32", 16)
    assert found["versions"]["torch"] == torch.__version__
    for row in found["kernels"]:
        if row["op"] == "store":
            assert row["wrong_rows"] == 0
        else:
            assert 0 < row["error"] <= row["max_error"] == 2e-3
    assert found["seconds"] < 60


def test_formats_may_differ_by_layer_and_be_several(gemma_dir: str) -> None:
    by_layer = ("--kv-cache-dtype", "0-1:bf16,2-:k=q8_0,v=q4_0")
    found = checked(gemma_dir, *ON_CPU, *by_layer, "--kv-cache-dtype", "bf16")
    tried = [(row["op"], row["format"], row["window"]) for row in found["kernels"]]
    assert len(set(tried)) == len(tried) == 10
    assert {row["format"] for row in found["kernels"]} == {"bf16", "k=q8_0,v=q4_0"}


def test_sinks_of_a_model_are_tried(tmp_path: Path) -> None:
    config = GptOssConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64
    )
    found = checked(saved(tmp_path, config), *ON_CPU, "--page-tokens", "32")
    assert {row["layer"] for row in found["kernels"]} == {
        "4/2x64, pages of 32, window 128, sinks",
        "4/2x64, pages of 32, sinks",
    }


def test_prefill_reads_packed_are_decodes_of_several_tokens_at_any_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts: list[bool] = []
    decode = ops.decode

    def noted(*given: Any, **options: Any) -> Any:
        cuts.append(given[3].any_cut)
        return decode(*given, **options)

    monkeypatch.setattr(ops, "decode", noted)
    directory = saved(tmp_path, llama(head_dim=64).config)
    found = checked(directory, *ON_CPU, "--prefill-reads", "packed")
    assert cuts == [False, True]
    assert [(row["op"], row["query_tokens"]) for row in found["kernels"]] == [
        ("store", None), ("decode", 1), ("decode", 3),
    ]  # fmt: skip


def test_the_table_has_a_row_a_kernel(gemma_dir: str) -> None:
    done = check(gemma_dir, *ON_CPU, "--kv-cache-dtype", "k=q8_0,v=q4_0")
    assert done.exit_code == 0
    rows = [line.split("│")[1:-1] for line in done.stdout.splitlines() if "pages of" in line]
    assert [cell.strip() for cell in rows[0][:4]] == [
        "store", "reference", "k=q8_0,v=q4_0", "2/1x128, pages of 16, window 24",
    ]  # fmt: skip
    assert len(rows) == 5
    assert "all 5 kernels agree with the formats' definition, in " in done.stdout


def test_each_route_of_an_extend_is_named(tmp_path: Path) -> None:
    if support.unavailable("triton", "cpu"):
        pytest.skip("Triton's interpreter is off")
    given = saved(tmp_path, llama(head_dim=64).config), *ON_CPU, "--kv-cache-dtype", "q8_0"
    given += ("--attention-backend",)
    extend = checked(*given, "extend=triton")["kernels"][-1]
    assert (extend["op"], extend["backend"]) == ("extend", "triton")
    assert list(extend["routes"]) == ["loop", "scratch", "dense"]
    errors = [route["error"] for route in extend["routes"].values()]
    assert extend["error"] == max(errors) <= extend["max_error"]
    done = check(*given, "extend=triton")
    words = ", ".join(
        f"{name} {error:.0e}" for name, error in zip(extend["routes"], errors, strict=True)
    )
    assert words in done.stdout
    found = checked(*given, "extend=reference")["kernels"][-1]
    assert found["op"] == "extend" and "routes" not in found, "the reference has one way"


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_kernel_that_fails_is_named_and_the_exit_code_is_1(
    gemma_dir: str, monkeypatch: pytest.MonkeyPatch, form: tuple[str, ...]
) -> None:
    extend = reference.extend
    monkeypatch.setattr(
        reference, "extend", lambda *args: (1.5 if args[-2].window else 1) * extend(*args)
    )
    done = check(gemma_dir, *ON_CPU, "--kv-cache-dtype", "q8_0", *form)
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert line == (
        "error: extend of reference, q8_0, 2/1x128, pages of 16, window 24: error 0.5 against "
        "attention in float64, at most 0.002 is allowed"
    )
    if form:
        found = json.loads(done.stdout)
        assert [row["op"] for row in found["kernels"] if not row["agrees"]] == ["extend"]
        assert not found["agrees"]


@pytest.mark.gpu
def test_it_tries_what_serving_would_take_on_a_gpu(tmp_path: Path) -> None:
    directory = saved(tmp_path, llama(head_dim=128).config)
    found = checked(directory, "--attention-backend", "decode=cuda")
    backends = {row["op"]: row["backend"] for row in found["kernels"]}
    assert backends == {"store": "triton", "decode": "cuda", "extend": "triton"}
    assert found["launches"]["cuda"]["decode"] == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    "pair", ["k=q8_0,v=q4_0", "k=q4_0,v=q8_0", "k=fp8,v=nvfp4", "k=bf16,v=iso3", "k=iso4,v=q6_0"]
)
@pytest.mark.parametrize("backend", ["auto", "decode=cuda"])
def test_p064_keys_and_values_of_two_formats_run_on_the_gpu(
    tmp_path: Path, pair: str, backend: str
) -> None:
    """None is computed somewhere else in silence."""
    directory = saved(tmp_path, llama(head_dim=128).config)
    asked = ("--kv-cache-dtype", pair, "--device", "cuda", "--attention-backend", backend)
    found = checked(directory, *asked, "--dtype", "bfloat16")
    assert {row["format"] for row in found["kernels"]} == {pair}
    assert {row["backend"] for row in found["kernels"]} <= {"triton", "cuda"}
    assert not any(found["launches"]["reference"].values())


def test_a_model_s_layers_are_its_own(gemma_dir: str) -> None:
    done = check(gemma_dir, "--shape", "4/2x64")
    assert done.exit_code == 2
    assert "a MODEL has layers of its own" in done.stderr
    done = check("--prefill-reads", "packed")
    assert done.exit_code == 2
    assert "it needs a MODEL" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--kv-cache-dtype", "q5_0"), "codecs are fp32, bf16"),
        (("--attention-backend", "decode=cuda"), "decode: cuda cannot run on cpu"),
        (("--prefill-reads", "fresh"), "prefill_reads must be own or packed, got 'fresh'"),
        (("--dtype", "int8"), "dtype must be auto or one of float32"),
    ],
)
def test_what_serving_would_refuse_is_refused(
    gemma_dir: str, arguments: tuple[str, ...], said: str
) -> None:
    done = check(gemma_dir, *ON_CPU, *arguments)
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert said in line


def test_a_model_that_is_not_there_is_refused() -> None:
    done = check("no/such/model")
    assert done.exit_code == 2
    assert "there is no model at" in done.stderr


def test_p128_a_declared_format_is_what_is_tried_and_is_said(tmp_path: Path) -> None:
    config = llama(head_dim=64).config
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    config.quantization_config = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    directory = saved(tmp_path, config)
    found = checked(directory, *ON_CPU)
    assert {row["format"] for row in found["kernels"]} == {"fp8"}
    (note,) = found["notes"]
    assert note.startswith("the checkpoint declares its KV cache's format (kv_cache_scheme {")
    done = check(directory, *ON_CPU, "--kv-cache-dtype", "q4_0")
    assert "note: the checkpoint declares" in done.stdout
    assert "q4_0 is used, as asked" in " ".join(done.stdout.split())
