"""`kvq serve` as a user starts it, spoken to by the openai client."""

import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import psutil
import pytest
from own_process import own_bytes
from prometheus_client.parser import text_string_to_metric_families

START_SECONDS = 180


class Server:
    """A `kvq serve` process on a free port."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvq_cli", "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""
        self._url = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._url.wait(START_SECONDS):
            self.process.kill()
            raise AssertionError(f"no URL after {START_SECONDS} s:\n{self.output}")
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                if httpx.get(self.url + "/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        self.client = openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0)
        self.model = self.client.models.list().data[0].id

    def _read(self):
        with self.process.stdout as lines:
            for line in lines:
                self.output += line
                if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                    self.url = found.group()
                    self._url.set()
        self._url.set()

    def metric(self, name, **labels):
        families = text_string_to_metric_families(httpx.get(self.url + "/metrics").text)
        return sum(
            s.value
            for family in families
            for s in family.samples
            if s.name == name and labels.items() <= s.labels.items()
        )

    def pages_in_use(self):
        return self.metric("kvq_pages", state="used")

    def stop(self):
        self.client.close()
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(20)
        self._reader.join(20)
        return code


@pytest.fixture(scope="module")
def smollm2(smollm2_dir):
    server = Server("--model", str(smollm2_dir), "--kv-cache-dtype", "k=q8_0,v=q4_0")
    yield server
    if server.process.poll() is None:
        server.stop()


def ask(server, content, **options):
    return server.client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": content}],
        temperature=0,
        **{"max_tokens": 24, **options},
    )


def test_start_up_says_what_a_token_costs(smollm2):
    # 30 layers × 3 heads × (q8_0 68 + q4_0 36) bytes; bf16: 256
    assert "9,360" in smollm2.output
    assert "23,040" in smollm2.output
    assert "reference" in smollm2.output
    assert "curl" in smollm2.output


def test_chat_answers_coherently(smollm2):
    answer = ask(smollm2, "What is the capital of France?")
    assert "Paris" in answer.choices[0].message.content
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == answer.usage.total_tokens


def test_streaming_gives_the_same_text(smollm2):
    ask(smollm2, "Name three colours.")  # so that both below begin with the same cached tokens
    whole = ask(smollm2, "Name three colours.").choices[0].message.content
    stream = ask(
        smollm2, "Name three colours.", stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole
    assert len([c for c in chunks if c.choices]) > 3
    assert chunks[-1].usage.completion_tokens > 3


def test_sixteen_requests_at_once(smollm2):
    with ThreadPoolExecutor(16) as pool:
        answers = list(
            pool.map(
                lambda n: ask(smollm2, "What is the capital of France?", max_tokens=n),
                range(1, 17),
            )
        )
    for n, answer in enumerate(answers, 1):
        whole = "The capital of France is Paris."
        assert answer.choices[0].message.content == whole or n < 8
        assert whole.startswith(answer.choices[0].message.content)
        assert answer.usage.completion_tokens == min(n, 8)
        assert answer.choices[0].finish_reason == ("length" if n < 8 else "stop")
    assert smollm2.pages_in_use() == 0


def test_a_client_that_disconnects_frees_its_pages(smollm2):
    stream = ask(smollm2, "Write a long story.", max_tokens=2000, stream=True)
    for _, _chunk in zip(range(3), stream, strict=False):
        pass
    assert smollm2.pages_in_use() > 0
    stream.close()
    deadline = time.monotonic() + 10
    while smollm2.pages_in_use() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert smollm2.pages_in_use() == 0
    assert smollm2.metric("kvq_num_requests_running") == 0


def test_wrong_input_gets_openai_shaped_errors(smollm2):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(smollm2, "hello", max_tokens=100_000)
    assert "100000" in caught.value.message
    with pytest.raises(openai.NotFoundError) as caught:
        smollm2.client.chat.completions.create(
            model="gpt-4", messages=[{"role": "user", "content": "hi"}]
        )
    assert smollm2.model in caught.value.message


def test_a_second_question_finds_the_first_ones_tokens_cached(smollm2):
    story = "Tell me about the river that runs through the old town and its five bridges."
    first = ask(smollm2, story, max_tokens=4).usage
    again = ask(smollm2, story, max_tokens=4).usage
    other = ask(smollm2, story + " Be brief.", max_tokens=4).usage
    assert first.prompt_tokens_details.cached_tokens < first.prompt_tokens - 10
    assert again.prompt_tokens_details.cached_tokens == again.prompt_tokens - 1
    assert other.prompt_tokens_details.cached_tokens > first.prompt_tokens - 10


def ctl(server, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "kvq_cli", "ctl", *arguments, "--url", server.url],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )


def test_the_cache_is_resized_while_an_answer_streams(smollm2):
    question, options = "Count from one to forty in words.", {"max_tokens": 60}
    ask(smollm2, question, **options)
    whole = ask(smollm2, question, **options).choices[0].message.content
    text = ""
    for n, chunk in enumerate(ask(smollm2, question, stream=True, **options)):
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        if n == 5:
            done = ctl(smollm2, "cache", "--tokens", "9k")
            assert done.returncode == 0, done.stderr
            assert "9,000 tokens become 9,008: a page holds 16" in done.stdout
            assert "1 kept their pages" in done.stdout
    assert text == whole
    shown = ctl(smollm2, "stats").stdout
    assert "9,008 tokens in" in shown
    assert "563: " in shown
    assert "9,360 bytes, 40.6% of bf16's 23,040" in shown
    assert ask(smollm2, "What is the capital of France?").choices[0].message.content


def test_a_resize_that_cannot_be_is_refused_and_the_server_goes_on(smollm2):
    done = ctl(smollm2, "cache", "--tokens", "1g")
    assert done.returncode == 2
    assert "149,760 a page" in done.stderr
    done = ctl(smollm2, "cache", "--kv-cache-dtype", "iso4")
    assert done.returncode == 2
    assert "head_dim 64" in done.stderr
    assert ask(smollm2, "hello", max_tokens=2).usage.completion_tokens == 2


def test_ctrl_c_ends_it_cleanly_last(smollm2):
    assert smollm2.stop() in (0, 130)
    assert "Traceback" not in smollm2.output


def test_a_codec_the_model_cannot_use_is_refused_before_weights_load(smollm2_dir):
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "kvq_cli", "serve", str(smollm2_dir), "--kv-cache-dtype", "iso3"],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 2
    assert "64" in said and "128" in said and "q4_0" in said
    assert "loading" not in said.lower()
    assert "Traceback" not in said
    assert time.monotonic() - start < 60


def test_iso_on_gemma_is_served_with_a_warning(gemma_dir):
    server = Server(
        "--model", str(gemma_dir), "--kv-cache-dtype", "iso4", "--max-model-len", "1024"
    )
    try:
        assert "iso4" in server.output
        assert "ruin" in server.output.lower() or "outlier" in server.output.lower()
        answer = server.client.completions.create(
            model=server.model, prompt="The capital of France is", max_tokens=8, temperature=0
        )
        assert answer.usage.completion_tokens == 8
    finally:
        assert server.stop() in (0, 130)


def test_the_saving_of_a_format_shows_in_the_processs_memory(smollm2_dir):
    """And requests add no more to it than a few steps' tensors."""
    remainder = 64 << 20  # of steps, sockets and what an allocator keeps
    taken, said = {}, {}
    for cache in ("bf16", "q4_0"):
        server = Server(
            "--model", str(smollm2_dir), "--kv-cache-dtype", cache, "--num-tokens", "24576"
        )
        try:
            process = psutil.Process(server.process.pid)
            ask(server, "hello", max_tokens=2)
            taken[cache] = own_bytes(process)
            said[cache] = httpx.get(server.url + "/v1/kv/status").json()["bytes"]
            with ThreadPoolExecutor(4) as pool:
                answers = [pool.submit(ask, server, f"{n} " * 200, max_tokens=8) for n in range(4)]
            assert all(answer.result().usage.completion_tokens for answer in answers)
            assert own_bytes(process) - taken[cache] < remainder
        finally:
            server.stop()
    assert said["bf16"] > 500 << 20
    assert abs((taken["bf16"] - taken["q4_0"]) - (said["bf16"] - said["q4_0"])) < remainder
