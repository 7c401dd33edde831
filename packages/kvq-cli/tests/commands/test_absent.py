"""What other servers can do and kvq cannot: said at once, not when it is needed."""

from __future__ import annotations

import subprocess
import sys

import httpx
import pytest
from http_server import serving
from scripted_engine import ScriptedEngine

from kvq_cli.commands.absent import ABSENT, ONE_DEVICE


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvq_cli", *arguments],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
        env={"COLUMNS": "400", "PATH": "", "PYTHONPATH": ":".join(sys.path)},
    )


def refused(name: str, *command: str) -> None:
    done = run(*command, f"{name}=2")
    assert done.returncode == 2
    assert name in done.stderr and ABSENT[name][:40] in done.stderr
    assert not done.stdout and "Traceback" not in done.stderr and "loading " not in done.stderr


@pytest.mark.parametrize("name", [name for name, why in ABSENT.items() if why is ONE_DEVICE])
def test_f41_more_than_one_device_is_refused_before_a_model_loads(name: str) -> None:
    refused(name, "serve", "no/such/model")


def test_f41_a_rebuild_over_several_devices_is_refused_before_anything_is_sent() -> None:
    engine = ScriptedEngine()
    with serving(engine) as url:
        refused("--tp", "ctl", "cache", "--tokens", "64", "--url", url)
        answer = httpx.post(f"{url}/v1/kv/rebuild", json={"num_tokens": 64, "tp": 2})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tp"
    assert not engine.rebuilds


@pytest.mark.parametrize("name", [name for name, why in ABSENT.items() if why is not ONE_DEVICE])
def test_f59_a_cache_in_the_hosts_memory_or_on_a_disk_is_refused_with_what_to_do(name: str) -> None:
    refused(name, "serve", "no/such/model")
    assert "--kv-cache-dtype" in ABSENT[name] and "--num-tokens" in ABSENT[name]
