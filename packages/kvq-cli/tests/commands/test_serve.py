"""`kvq serve` as a process, its engine scripted; tests/test_serve_e2e.py has real models."""

import dataclasses
import inspect
import json
import re
import shlex
import shutil
import signal
import socket
import subprocess

import httpx
import openai
import pytest
from http_server import client_of, wait_for
from serve_process import Process

from kvq_cli.commands.serve import serve
from kvq_cli.server.limits import HttpOptions


def test_it_says_what_it_serves_and_a_command_that_works(start):
    process = start("demo")
    url = process.url
    for fact in ("it's a model", "k=q8_0,v=q4_0", "9,360 bytes", "40.6%", "23,040", "1,600 tokens"):
        assert fact in process.said
    assert re.search(r"attention +store fast, decode fast, extend slow ", process.said)
    assert "(k 6.5 MiB, v 3.0 MiB)" in process.said
    assert "16 answers; 256 more wait" in process.said
    assert "a note for the [user]" in process.said
    command = next(line for line in process.said.splitlines() if line.startswith("curl "))
    _, where, _, header, _, body = shlex.split(command)
    assert where == f"{url}/v1/chat/completions"
    headers = dict([header.split(": ")])
    answer = httpx.post(where, content=body, headers=headers)
    assert answer.json()["choices"][0]["message"]["content"]


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_the_command_can_be_pasted_into_a_shell(start):
    process = start("untemplated")
    assert process.url
    command = next(line for line in process.said.splitlines() if line.startswith("curl "))
    assert "/v1/completions" in command
    answer = subprocess.run(command, shell=True, capture_output=True, check=True, timeout=30)
    assert json.loads(answer.stdout)["choices"][0]["text"]


def test_ctrl_c_ends_it_with_one_line_and_requests_with_an_error(start):
    process = start("demo")
    with client_of(process.url) as client:
        client.models.list()  # leaves an idle connection open
        stream = client.completions.create(
            model="it's a model", prompt="a", max_tokens=900, stream=True
        )
        next(iter(stream))
        process.process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="stopping") as cut:
            list(stream)
        assert cut.value.code == "stopping"
    assert process.end() == 0
    after = process.said.partition("curl ")[2].splitlines()[1:]
    assert after == ["stopped"]


def test_sigterm_lets_requests_finish_and_takes_no_new_ones(start):
    process = start("demo", "--api-key", "s3cret")
    with client_of(process.url, "s3cret") as client:
        assert "Authorization: Bearer KEY" in process.said and "s3cret" not in process.said
        stream = client.completions.create(
            model="it's a model", prompt="a", max_tokens=150, stream=True
        )
        next(iter(stream))
        process.process.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{process.url}/ready").status_code == 503)
        with pytest.raises(openai.InternalServerError, match="stopping") as late:
            client.completions.create(model="it's a model", prompt="a")
        assert (late.value.status_code, late.value.code) == (503, "stopping")
        *_, last = stream
        assert last.choices[0].finish_reason == "length"
    assert process.end() == -signal.SIGTERM
    assert "Traceback" not in process.said


def test_sigterm_waits_for_no_request_without_end(start):
    process = start("hasty")  # whose requests may go on for half a second
    with client_of(process.url) as client:
        stream = client.completions.create(
            model="it's a model", prompt="a", max_tokens=900, stream=True
        )
        next(iter(stream))
        process.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="stopping"):
            list(stream)
    assert process.end() == -signal.SIGTERM


def test_what_http_options_cannot_be_is_said_before_the_model_loads(start):
    process = start("endless", "--api-key", "")
    assert process.end() == 2
    assert "api_key is empty" in process.said
    assert len(process.said.splitlines()) == 1


def test_whatever_is_asked_it_says_nothing_more_until_it_ends(start):
    """Requests, refusals and clients that leave fill no log."""
    process = start("demo")
    with client_of(process.url) as client:
        for n in range(20):
            client.completions.create(model="it's a model", prompt="a", max_tokens=1 + n)
            with pytest.raises(openai.BadRequestError):
                client.completions.create(model="it's a model", prompt="a", max_tokens=-1)
            with pytest.raises(openai.NotFoundError):
                client.completions.create(model="no model", prompt="a")
            client.completions.create(
                model="it's a model", prompt="a", max_tokens=900, stream=True
            ).close()
        httpx.post(f"{process.url}/v1/completions", content=b"{", headers={"a": "b"})
    assert process.interrupt() == 0
    assert process.said.partition("curl ")[2].splitlines()[1:] == ["stopped"]


def test_a_second_ctrl_c_waits_for_nothing(start):
    process = start("stubborn")
    assert process.url
    process.process.send_signal(signal.SIGINT)
    process.wait_for("stopping")
    assert process.interrupt() == -signal.SIGINT
    assert "Traceback" not in process.said


def test_sigterm_waits_for_no_step_without_end(start):
    process = start("stubborn")
    assert process.url
    process.process.send_signal(signal.SIGTERM)
    assert process.end() == -signal.SIGTERM
    assert "Traceback" not in process.said


def test_ctrl_c_while_it_loads_ends_it_with_one_line(start):
    process = start("endless")
    process.wait_for("loading")
    assert process.interrupt() == 130
    assert process.said.splitlines()[-1] == "interrupted"
    assert "Traceback" not in process.said


def test_a_taken_port_is_known_before_the_model_loads(start):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        process = start("demo", "--port", str(port))
        assert process.end() == 2
    assert process.said.startswith(f"error: cannot listen on 127.0.0.1 port {port}: ")
    assert "--port" in process.said
    assert len(process.said.splitlines()) == 1


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1"])
def test_an_address_of_another_machine_is_refused(start, host):
    process = start("demo", "--host", host)
    assert process.end() == 2
    assert host in process.said
    assert "Traceback" not in process.said


def test_what_cannot_be_served_is_one_message(start):
    process = start("refused")
    assert process.end() == 2
    *_, last = process.said.splitlines()
    assert last == "error: head_dim 64 of [this] model does not fit"
    assert "Traceback" not in process.said


def test_a_defect_keeps_its_traceback(start):
    process = start("defective")
    assert process.end() == 1
    assert "Traceback" in process.said
    assert "ValueError: a defect" in process.said


@pytest.mark.parametrize("arguments", [(), ("demo", "--model", "demo")])
def test_one_model_is_wanted(start, arguments):
    process = start(*arguments)
    assert process.end() == 2
    assert "give one model" in process.said


def options_of(process: Process) -> dict[str, object]:
    """What the engine was built with."""
    assert process.url
    line = next(line for line in process.said.splitlines() if line.startswith("options "))
    found: dict[str, object] = json.loads(line.removeprefix("options "))
    return found


def test_every_option_reaches_the_engine(start):
    wanted = {
        "model": "some/where",
        "kv_cache_dtype": "k=q8_0,v=q4_0",
        "dtype": "bfloat16",
        "device": "cpu",
        "num_tokens": 4096,
        "max_model_len": 2048,
        "page_tokens": 32,
        "max_running_requests": 3,
        "max_prefill_tokens": 64,
        "prefill_reads": "packed",
        "prefill_scratch_mb": 8,
        "cuda_graph_max_bs": 6,
        "on_failed_check": "fallback",
        "attention_backend": "reference",
        "memory_ratio": 0.5,
        "cache_type": "none",
        "served_model_name": "name",
        "threads": 3,
    }
    process = start(*(f"--{k.replace('_', '-')}={v}" for k, v in wanted.items()))
    assert options_of(process) == wanted | {
        "num_pages": None,
        "compile": False,
        "cuda_graph_max_prefill_tokens": None,
        "state_snapshots": None,
    }
    assert "name" in process.said.partition("curl")[2]


def test_other_names_of_the_same_options_reach_the_engine(start):
    given = "--kv-cache-iso=iso3", "--num-pages=256", "--compile"
    process = start("some/where", *given, "--cuda-graph-max-prefill-tokens=32")
    found = options_of(process)
    assert found["cuda_graph_max_prefill_tokens"] == 32
    assert found["compile"] is True and found["cuda_graph_max_bs"] is None
    assert (found["kv_cache_dtype"], found["num_pages"], found["num_tokens"]) == ("iso3", 256, None)


def test_options_that_disagree_are_one_message(start):
    process = start("demo", "--kv-cache-iso=iso3", "--kv-cache-dtype=q8_0")
    assert process.end() == 2
    *_, last = process.said.splitlines()
    assert last.startswith("error: kv_cache_dtype 'q8_0' and kv_cache_iso iso3 name two formats")


def test_options_and_their_defaults_are_the_engines():
    # compose needs torch, which `kvq --help` must not load: so the command repeats its defaults
    from kvq_cli.compose import ServeOptions

    engines = {f.name: f.default for f in dataclasses.fields(ServeOptions)}
    commands = {
        name: parameter.default for name, parameter in inspect.signature(serve).parameters.items()
    }
    assert engines.keys() - commands.keys() == set()
    https = {f.name: f.default for f in dataclasses.fields(HttpOptions)}
    https["max_body_mib"] = https.pop("max_body_bytes") >> 20
    assert {name: commands[name] for name in https} == https
    assert {n: d for n, d in commands.items() if n in engines and n != "model"} == {
        n: d for n, d in engines.items() if n != "model"
    }
