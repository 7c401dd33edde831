import httpx
from http_server import wait_for


def test_health_follows_the_engine(url, engine):
    answer = httpx.get(f"{url}/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    engine.fail("out of memory")
    wait_for(lambda: engine.failure is not None)
    answer = httpx.get(f"{url}/health")
    assert answer.status_code == 503
    assert "out of memory" in answer.json()["error"]["message"]


def test_ready_is_no_while_the_cache_is_rebuilt_or_the_engine_failed(url, engine):
    answer = httpx.get(f"{url}/ready")
    assert (answer.status_code, answer.json()) == (200, {"status": "ready"})
    engine.state = "rebuilding"
    answer = httpx.get(f"{url}/ready")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "rebuilding")
    assert httpx.get(f"{url}/health").status_code == 200
    engine.fail("out of memory")
    wait_for(lambda: engine.failure is not None)
    assert "out of memory" in httpx.get(f"{url}/ready").json()["error"]["message"]
