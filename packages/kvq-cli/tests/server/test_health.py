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
