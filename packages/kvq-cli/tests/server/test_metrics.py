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
    assert after["kvq_num_preemptions_total",] == 0


def test_what_vllm_counts_too_has_vllms_name_as_well(url, client):
    """The names that dashboards made for it ask for, with its labels."""
    client.completions.create(model=MODEL, prompt=[97, 98, 99])
    answer = httpx.get(f"{url}/metrics")
    samples = [s for f in text_string_to_metric_families(answer.text) for s in f.samples]
    theirs = [s for s in samples if s.name.startswith("vllm:")]
    assert {s.name.removeprefix("vllm:") for s in theirs if "_bucket" not in s.name} == {
        "num_requests_running",
        "num_requests_waiting",
        "num_preemptions_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "request_success_total",
        "kv_cache_usage_perc",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        *(
            f"{name}_{part}"
            for name in (
                "time_to_first_token_seconds",
                "inter_token_latency_seconds",
                "e2e_request_latency_seconds",
            )
            for part in ("count", "sum")
        ),
    }
    ours = {(s.name, frozenset(s.labels.items())): s.value for s in samples}
    for sample in theirs:
        labels = dict(sample.labels)
        assert (labels.pop("model_name"), labels.pop("engine")) == (MODEL, "0")
        name = "kvq_" + sample.name.removeprefix("vllm:")
        assert ours[name, frozenset(labels.items())] == sample.value


def test_the_cache_has_series_of_its_own(url, client, engine):
    found = read(url)
    assert found["kvq_cache_info", "k=q8_0,v=q4_0", MODEL] == 1
    assert found["kvq_cache_bf16_bytes_per_token",] == 23040
    assert found["kvq_cache_bytes", "full"] == 10083840
    assert found["kvq_cache_bytes", "window"] == 399360
    assert found["kvq_prefix_cache_evicted_pages_total",] == 6
    assert found["kvq_kv_cache_usage_perc",] == 0


def test_latencies_are_the_clients_wait(url, client, engine):
    engine.pause = 0.05
    client.completions.create(model=MODEL, prompt=[97], max_tokens=4)
    found = read(url)
    first = found["kvq_time_to_first_token_seconds_sum",]
    whole = found["kvq_e2e_request_latency_seconds_sum",]
    assert 0.05 <= first <= whole - 0.15
    assert found["kvq_inter_token_latency_seconds_count",] == 3
    assert 0.15 <= found["kvq_inter_token_latency_seconds_sum",] <= whole


def test_pages_in_use_and_unfinished_requests_show(url, client, engine):
    engine.pause, engine.words = 0.02, 10_000
    stream = client.completions.create(model=MODEL, prompt=[97] * 20, max_tokens=900, stream=True)
    next(iter(stream))
    during = read(url)
    assert during["kvq_num_requests_running",] == 1
    assert during["kvq_pages", "full", "used"] == 2
    assert during["kvq_kv_cache_usage_perc",] == 2 / TOTAL_PAGES
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
