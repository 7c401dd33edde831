import httpx
import openai
import pytest
from http_server import wait_for
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import FAILS, MODEL, TOTAL_PAGES


def read(url):
    answer = httpx.get(f"{url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    samples = [s for f in text_string_to_metric_families(answer.text) for s in f.samples]
    return {(s.name, *sorted(s.labels.values())): s.value for s in samples}


def test_metrics_report_the_engine(url, client):
    before = read(url)
    assert before["kvq_num_requests_running",] == 0
    assert before["kvq_time_to_first_token_seconds_count",] == 0
    client.completions.create(model=MODEL, prompt=[97, 98, 99])
    client.completions.create(model=MODEL, prompt=[97], max_tokens=2)
    after = read(url)
    assert after["kvq_prompt_tokens_total",] == 4
    assert after["kvq_generation_tokens_total",] == 7
    assert after["kvq_steps_total",] == 3
    assert after["kvq_request_success_total", "stop"] == 1
    assert after["kvq_request_success_total", "length"] == 1
    assert after["kvq_request_success_total", "abort"] == 0
    assert after["kvq_pages", "free", "full"] == TOTAL_PAGES - 4
    assert after["kvq_pages", "cached", "full"] == 4
    assert after["kvq_pages", "full", "used"] == 0
    assert after["kvq_pages", "free", "window"] == 7
    assert after["kvq_cache_bytes_per_token",] == 9360
    assert after["kvq_cache_tokens",] == 1600
    assert after["kvq_prefix_cache_queries_total",] == 30
    assert after["kvq_prefix_cache_hits_total",] == 12
    assert after["kvq_time_to_first_token_seconds_count",] == 2
    assert after["kvq_e2e_request_latency_seconds_count",] == 2


def test_latencies_are_the_clients_wait(url, client, engine):
    engine.pause = 0.05
    client.completions.create(model=MODEL, prompt=[97], max_tokens=4)
    found = read(url)
    first = found["kvq_time_to_first_token_seconds_sum",]
    whole = found["kvq_e2e_request_latency_seconds_sum",]
    assert 0.05 <= first <= whole - 0.15


def test_pages_in_use_and_unfinished_requests_show(url, client, engine):
    engine.pause, engine.words = 0.02, 10_000
    stream = client.completions.create(model=MODEL, prompt=[97] * 20, max_tokens=900, stream=True)
    next(iter(stream))
    during = read(url)
    assert during["kvq_num_requests_running",] == 1
    assert during["kvq_pages", "full", "used"] == 2
    stream.close()
    wait_for(lambda: not engine.live)
    after = read(url)
    assert after["kvq_pages", "full", "used"] == 0
    assert after["kvq_request_success_total", "abort"] == 1
    assert after["kvq_e2e_request_latency_seconds_count",] == 0


def test_a_failed_request_is_no_finished_one(url, client):
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model=MODEL, prompt=[FAILS])
    assert read(url)["kvq_e2e_request_latency_seconds_count",] == 0
