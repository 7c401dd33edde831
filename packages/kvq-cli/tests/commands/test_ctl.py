"""`kvq ctl` as a process, against a server over a scripted engine and against none."""

import json
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from http_server import serving, wait_for
from scripted_engine import ScriptedEngine
from typer.testing import CliRunner

from kvq_cli.commands import client
from kvq_cli.main import app
from kvq_cli.server.limits import HttpOptions
from kvq_pools import RebuildFailed, RebuildRejected


def ctl(*arguments, url=None, **environment):
    where = [] if url is None else ["--url", url]
    return subprocess.run(
        [sys.executable, "-m", "kvq_cli", "ctl", *arguments, *where],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
        env={"COLUMNS": "120", **environment},
    )


def one_line(done, code):
    """The one line of an error."""
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.fixture
def engine():
    return ScriptedEngine()


@pytest.fixture
def url(engine):
    with serving(engine) as url:
        yield url


def test_a_server_with_a_key_is_asked_with_it(engine):
    with serving(engine, HttpOptions(api_key="s3cret")) as url:
        assert "API key is missing" in one_line(ctl("stats", url=url), 2)
        assert "API key is wrong" in one_line(ctl("stats", "--api-key", "x", url=url), 2)
        assert ctl("stats", "--api-key", "s3cret", url=url).returncode == 0
        done = ctl("cache", "--tokens", "3200", "--api-key", "s3cret", url=url)
        assert done.returncode == 0
    assert engine.rebuilds == [(3200, None)]


def test_stats_show_what_the_status_has(url):
    done = ctl("stats", url=url)
    assert done.returncode == 0
    for words in (
        "ready",
        "9,360 bytes, 40.6% of bf16's 23,040",
        "k q8_0 0, 2-4; v q4_0 0, 2-4",
        "1,600 tokens in 14.3 MiB",
        "100: 96 free, 4 cached, 0 used; 99,840 bytes each",
        "7: 7 free, 0 cached, 0 used; 49,920 bytes each, window 32",
        "12 of 30 tokens of 3 requests found (40.0%); 6 pages evicted",
        "0 running, 0 waiting",
        "7 kernels agree with the formats' definition, in 0.2 s",
        "extend is computed by slow instead",
        "triton: dense (cudnn) 2,048 times, triton: loop 3 times",
    ):
        assert words in done.stdout
    assert "last rebuild" not in done.stdout


def test_stats_as_json_are_the_servers(url):
    found = json.loads(ctl("stats", "--json", url=f"{url}/").stdout)
    assert found["num_tokens"] == 1600
    assert found["state"] == "ready"


def test_a_size_is_rounded_up_to_whole_pages_and_said(url, engine):
    done = ctl("cache", "--tokens", "1.25k", "--kv-cache-dtype", "q4_0", url=url)
    assert done.returncode == 0
    assert "1,250 tokens become 1,264: a page holds 16" in done.stdout
    assert "1,600 → 1,264 tokens" in done.stdout
    assert "k=q8_0,v=q4_0 → q4_0" in done.stdout
    assert "2 kept their pages, 1 computed again" in done.stdout
    assert "5 kept, 3 dropped" in done.stdout
    assert engine.rebuilds == [(1264, "q4_0")]
    assert "1,600 → 1,264 tokens" in ctl("stats", url=url).stdout


def test_whole_pages_are_sent_as_they_are(url, engine):
    done = ctl("cache", "--tokens", "1.6k", url=url)
    assert done.returncode == 0
    assert "become" not in done.stdout
    assert engine.rebuilds == [(1600, None)]


def test_a_format_alone_keeps_the_size(url, engine):
    assert ctl("cache", "--kv-cache-dtype", "q4_0", url=url).returncode == 0
    assert engine.rebuilds == [(None, "q4_0")]


def test_what_the_server_refuses_is_one_line(url, engine):
    engine.rebuild_error = RebuildRejected("a cache of 1,600 tokens needs 9 bytes more")
    assert "needs 9 bytes more" in one_line(ctl("cache", "--tokens", "1.6k", url=url), 2)


def test_what_the_server_fails_at_is_one_line(url, engine):
    engine.rebuild_error = RebuildFailed("out of memory; the pool has its 100 pages")
    assert "out of memory" in one_line(ctl("cache", "--tokens", "1.6k", url=url), 4)


def test_stats_of_a_dead_engine_say_why(url, engine):
    wait_for(lambda: engine.running)
    engine.fail("the pool has no memory")
    wait_for(lambda: engine.failure is not None)
    assert "failed: the pool has no memory" in ctl("stats", url=url).stdout


@pytest.mark.parametrize("arguments", [("cache", "--tokens", "2k"), ("stats",)])
def test_no_server_is_one_line_that_names_the_url(arguments):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    line = one_line(ctl(*arguments, url=f"http://127.0.0.1:{port}"), 3)
    assert f"no server answers at http://127.0.0.1:{port}" in line
    assert "kvq serve" in line


@contextmanager
def stranger(status, body):
    """The URL of a server that gives one answer to everything."""

    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Stranger) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(10)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, "nothing"),
        (404, {"error": {"message": "no such path"}}),
        (200, {}),
        (200, []),
        (200, {"bytes_per_token": 1, "page_tokens": 16}),
        (204, {}),
        (301, {}),
        (302, {"error": {"message": "moved"}}),
        (401, {"error": {"message": "who are you?"}}),
        (403, {"error": {"message": "not you"}}),
        (400, {"error": {"message": 5}}),
        (502, {"error": "bad gateway"}),
    ],
)
@pytest.mark.parametrize("arguments", [["stats"], ["stats", "--json"], ["cache", "--tokens", "2k"]])
def test_a_server_that_is_not_kvqs_is_one_line(status, body, arguments):
    with stranger(status, body) as url:
        done = CliRunner().invoke(app, ["ctl", *arguments, "--url", url])
    assert (done.exit_code, done.stdout) == (3, "")
    assert f"{url} is no kvq server" in done.stderr and str(status) in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["stats"], ["cache", "--tokens", "2k"]])
def test_a_server_that_never_answers_is_not_waited_for(arguments, monkeypatch):
    assert 5 <= client.STATUS_TIMEOUT.read <= 20
    monkeypatch.setattr(client, "STATUS_TIMEOUT", httpx.Timeout(5, read=0.2))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = CliRunner().invoke(app, ["ctl", *arguments, "--url", url])
    assert done.exit_code == 3
    assert f"the server at {url} took the question and gave no answer within 0.2 s" in done.stderr


def test_a_rebuild_is_waited_for_and_ctrl_c_says_that_the_server_goes_on(url, engine):
    engine.rebuild_ends.clear()
    where = ["cache", "--kv-cache-dtype", "q4_0", "--url", url]
    with subprocess.Popen(
        [sys.executable, "-m", "kvq_cli", "ctl", *where], stderr=subprocess.PIPE, text=True
    ) as asking:
        wait_for(lambda: engine.state == "rebuilding")
        asking.send_signal(signal.SIGINT)
        said = asking.communicate(timeout=20)[1]
    engine.rebuild_ends.set()
    assert asking.returncode == 130
    assert "goes on with what it was asked" in said and "Traceback" not in said


@pytest.mark.parametrize("url", ["127.0.0.1:1919", "ftp://127.0.0.1", "http://", "http://x:port"])
def test_a_url_that_is_none_is_one_line(url):
    assert url in one_line(ctl("stats", url=url), 2)


def test_a_proxy_of_the_environment_is_not_asked(url):
    assert ctl("stats", url=url, HTTP_PROXY="http://127.0.0.1:9").returncode == 0


@pytest.mark.parametrize("size", ["many", "0", "1.0001k"])
def test_a_size_that_is_none_is_refused_before_anything_is_asked(size):
    assert size in one_line(ctl("cache", "--tokens", size, url="http://127.0.0.1:9"), 2)


def test_nothing_to_change_is_wrong_usage():
    done = ctl("cache", url="http://127.0.0.1:9")
    assert done.returncode == 2
    assert "--tokens" in done.stderr
