"""`kvq check` as its users run it; without a GPU the kernels run in Triton's interpreter."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import kvq_codecs
from kvq_attention import claims, crossovers, reference, support
from kvq_attention.bench.cases import parse_shape
from kvq_attention.needs import Need
from kvq_cli.main import app

SMALL = ("--shape", "4/2x128")


def check(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["check", *arguments], env={"COLUMNS": "120"})


def checked(*arguments: str, code: int = 0) -> dict[str, Any]:
    done = check(*arguments, "--json")
    assert done.exit_code == code, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("backend", "formats"),
    [("reference", kvq_codecs.names()), ("triton", ("bf16", "q8_0", "k=q4_0,v=nvfp4"))],
)
def test_p066_the_backend_that_was_asked_for_ran_and_no_other(
    backend: str, formats: tuple[str, ...]
) -> None:
    asked = [word for name in formats for word in ("--kv-cache-dtype", name)]
    found = checked(*SMALL, "--attention-backend", backend, *asked)
    for row in found["formats"]:
        assert {op: found["backend"] for op, found in row["ops"].items()} == dict.fromkeys(
            support.OPS, backend
        )
        assert row["ops"]["store"]["wrong_rows"] == row["ops"]["copy_pages"]["wrong_rows"] == 0
        for op in ("decode", "extend"):
            assert (
                row["ops"][op]["error"]
                <= row["ops"][op]["max_error"]
                == (4e-3 if torch.cuda.is_available() else 2e-3)
            )
    ran = dict.fromkeys(support.OPS, len(formats))
    if backend == "triton":
        extends = [row["ops"]["extend"]["routes"].values() for row in found["formats"]]
        tried = [[route for route in routes if not route["refused"]] for routes in extends]
        assert [len(routes) for routes in tried] == [2, 3, 3], "bf16 needs no scratch"
        assert all(route["error"] <= 4e-3 for routes in tried for route in routes)
        ran["extend"] = 8
    assert found["launches"].pop(backend) == ran
    assert found["launches"]
    assert all(not any(counted.values()) for counted in found["launches"].values())


def test_it_names_the_machine_the_versions_and_the_backends() -> None:
    found = checked("--kv-cache-dtype", "q4_0", "--device", "cpu")
    assert found["versions"].keys() >= {"python", "torch", "triton", "kvq-attention", "kvq-codecs"}
    assert found["versions"]["torch"] == torch.__version__
    assert found["device"]["type"] == "cpu"
    assert found["device"]["compute_capability"] is None
    assert found["backends"].keys() == support.BACKENDS.keys()
    assert found["backends"]["reference"] == {"unavailable": None}
    assert found["attention_backend"] == "auto"
    (row,) = found["formats"]
    assert {op["backend"] for op in row["ops"].values()} == {"reference"}


@pytest.mark.gpu
def test_auto_decodes_by_cuda_where_that_was_the_fastest_and_by_triton_elsewhere() -> None:
    found = checked()
    assert found["device"]["compute_capability"]
    layer = parse_shape(found["shape"])
    fastest = set()
    if found["backends"]["cuda"]["unavailable"] is None:
        for name in kvq_codecs.names():
            sizes = layer.dim, layer.dim, found["page_tokens"]
            need = Need("decode", name, name, *sizes, "cuda", group=layer.heads // layer.kv_heads)
            if crossovers.fastest("cuda", [need]):
                fastest.add(name)
        # the layer of `kvq check` is measured on every architecture that has regions
        assert bool(fastest) == all(map(crossovers.FASTEST.get, crossovers.levels()))
    codecs = set(kvq_codecs.names())
    ran = {
        row["format"]: {op: row["ops"][op]["backend"] for op in support.OPS}
        for row in found["formats"]
    }
    assert ran == {
        name: {
            "store": "triton",
            "decode": "cuda" if name in fastest else "triton",
            "extend": "triton",
            "copy_pages": "triton",
        }
        for name in codecs
    }
    assert found["launches"]["cuda"]["decode"] == len(fastest)
    assert found["launches"]["triton"]["decode"] == len(codecs - fastest)


@pytest.mark.gpu
def test_cuda_decodes_where_it_is_asked_for() -> None:
    found = checked("--attention-backend", "decode=cuda")
    ran = {row["format"]: row["ops"]["decode"]["backend"] for row in found["formats"]}
    served = {name for name, backend in ran.items() if backend == "cuda"}
    assert served == set(claims.CUDA_CODECS)
    assert found["launches"]["cuda"]["decode"] == len(served)
    assert found["launches"]["triton"]["decode"] == 0


def test_people_get_a_table_with_a_row_for_each_codec() -> None:
    done = check(*SMALL, "--device", "cpu")
    assert done.exit_code == 0
    for name in kvq_codecs.names():
        assert f"│ {name} " in done.stdout
    assert "launches of reference: store 11, decode 11, extend 11, copy_pages 11" in done.stdout
    assert "all that was tried agrees" in done.stdout


def test_what_is_not_tried_is_said_with_the_reason() -> None:
    asked = ("--kv-cache-dtype", "q4_0", "--kv-cache-dtype", "iso3", "--shape", "2/1x64")
    done = check(*asked, "--attention-backend", "triton")
    assert done.exit_code == 0, done.output
    said = "not tried: store, decode, extend, copy_pages of iso3: iso3: head_dim 64 is not a mult"
    assert said in done.stdout


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_disagreement_is_one_clear_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, form: tuple[str, ...]
) -> None:
    decode = reference.decode
    monkeypatch.setattr(reference, "decode", lambda *args: 2 * decode(*args))
    done = check("--kv-cache-dtype", "q4_0", "--device", "cpu", *form)
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert line == (
        "error: decode of reference, q4_0, 32/8x128, pages of 16: error 1 against attention in "
        "float64, at most 0.002 is allowed"
    )
    if form:
        found = json.loads(done.stdout)
        assert found["agrees"] is False
        assert f"error: {found['problems'][0]}" == line


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_decode_that_is_not_finite_is_null_in_strict_json(
    monkeypatch: pytest.MonkeyPatch, form: tuple[str, ...]
) -> None:
    decode = reference.decode
    monkeypatch.setattr(reference, "decode", lambda *args: torch.nan * decode(*args))
    done = check("--kv-cache-dtype", "q4_0", "--device", "cpu", *form)
    assert done.exit_code == 1
    assert "q4_0, 32/8x128, pages of 16: error inf against attention in" in done.stderr
    if form:

        def constant(name: str) -> None:
            raise AssertionError(f"{name} is not JSON")

        (row,) = json.loads(done.stdout, parse_constant=constant)["formats"]
        assert row["ops"]["decode"]["error"] is None
    else:
        assert "reference not finite" in done.stdout


def test_a_format_given_twice_is_tried_once() -> None:
    twice = ("--kv-cache-dtype", "q8_0", "--kv-cache-dtype", "k=q8_0,v=q8_0")
    found = checked(*SMALL, *twice)
    assert [row["format"] for row in found["formats"]] == ["q8_0"]


def test_formats_by_layer_are_refused_and_not_offered() -> None:
    done = check("--kv-cache-dtype", "0-1:bf16,2-:q8_0")
    assert done.exit_code == 2
    assert "it is no format; give one codec, or k=CODEC,v=CODEC; codecs are fp32" in done.stderr
    assert "LAYERS" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--shape", "4/2x99999999999"), "head_dim must be at most 65,536, got 99,999,999,999"),
        (("--shape", "8192/8192x64"), "heads must be at most 4,096, got 8,192"),
        (("--shape", "1/1x" + 5000 * "9"), "must be HEADS/KV_HEADSxHEAD_DIM"),
        (("--page-tokens", "99999999999"), "page_tokens must be at most 65,536, got 99,999"),
        (
            ("--shape", "4096/1x65536"),
            "heads · head_dim · page_tokens must be at most 8,388,608 in a trial, got 4,294,967",
        ),
    ],
)
def test_sizes_beyond_any_model_are_refused_by_their_limit(
    arguments: tuple[str, ...], said: str
) -> None:
    done = check(*arguments, "--kv-cache-dtype", "q8_0")
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--attention-backend", "turbo"), "'turbo'; there are auto, cuda, triton, reference"),
        (("--attention-backend", "encode=cuda"), "'encode' is no operation here; there are store,"),
        (("--attention-backend", "extend=cuda"), "extend=cuda cannot be tried: cuda lacks extend"),
        (("--attention-backend", "encode=reference"), "'encode' is no operation here; there are "),
        (
            ("--attention-backend", "decode=auto,decode=auto"),
            "'decode=auto,decode=auto': decode is",
        ),
        (("--attention-backend", "reference,triton"), "OP=NAME,… for single operations, as in dec"),
        (
            ("--attention-backend", "decode=cuda", "--device", "cpu"),
            "error: decode=cuda cannot be tried: cuda cannot run on cpu: its kernels run on cuda d",
        ),
        (
            ("--attention-backend", "decode=cuda", "--device", "cpu", "--kv-cache-dtype", "q8_0"),
            "error: decode=cuda cannot be tried: cuda cannot run on cpu: its kernels run on cuda d",
        ),
        (
            ("--attention-backend", "copy_pages=cuda", "--kv-cache-dtype", "q8_0"),
            "error: copy_pages=cuda cannot be tried: cuda lacks copy_pages; backends that can: ",
        ),
        (
            ("--attention-backend", "cuda", "--device", "cpu"),
            "error: cuda cannot run on cpu: its kernels run on cuda devices, not cpu",
        ),
        (
            (
                *("--kv-cache-dtype", "q8_0", "--kv-cache-dtype", "iso3", "--shape", "2/1x64"),
                *("--attention-backend", "decode=reference"),
            ),
            "error: decode=reference cannot be tried with iso3: iso3: head_dim 64 is not a multi",
        ),
        (("--shape", "3/2x64"), "HEADS a multiple of KV_HEADS"),
        (("--shape", "64"), "must be HEADS/KV_HEADSxHEAD_DIM, such as 32/8x128"),
        (("--kv-cache-dtype", "q5_0"), "codecs are fp32, bf16"),
        (("--device", "tpu"), "device must be auto, cpu or cuda, got 'tpu'"),
        (
            ("--attention-backend", "triton", "--page-tokens", "1"),
            "triton lacks store, decode and extend for page_tokens 1 (has 16, 32, 64, 128); back",
        ),
    ],
)
def test_what_cannot_be_tried_is_refused(arguments: tuple[str, ...], said: str) -> None:
    for form in ((), ("--json",)):
        done = check(*arguments, *form)
        assert done.exit_code == 2
        (line,) = done.stderr.splitlines()
        assert said in line
        assert done.stdout == ""


def test_a_named_operation_is_tried_with_the_formats_that_it_serves() -> None:
    """Of every codec, which nobody asked for one by one, some may be left out."""
    found = checked(
        "--shape", "2/1x64", "--device", "cpu", "--attention-backend", "decode=reference"
    )
    assert {row["format"] for row in found["formats"] if "error" in row["ops"]["decode"]} == {
        *kvq_codecs.names()
    } - {"iso3", "iso4"}
    assert found["launches"]["reference"]["decode"] == len(kvq_codecs.names()) - 2
