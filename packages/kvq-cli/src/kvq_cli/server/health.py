"""GET /health and /ready, for load balancers and start-up scripts."""

from __future__ import annotations

from fastapi import APIRouter

from kvq_cli.engine.params import EngineFailed
from kvq_cli.server import errors
from kvq_cli.server.errors import ApiError, stopping
from kvq_cli.server.generation import Service


def routes(service: Service) -> APIRouter:
    """The routes, for one engine."""
    router = APIRouter(tags=["operation"])
    engine = service.engine

    def require_healthy() -> None:
        if not engine.healthy:
            raise EngineFailed(engine.failure or "it is not running")

    @router.get("/health", responses={503: errors.ANSWERS[503]})
    async def health() -> dict[str, str]:
        """200 while requests are served, else 503 with the reason."""
        require_healthy()
        return {"status": "ok"}

    @router.get("/ready", responses={503: errors.ANSWERS[503]})
    async def ready() -> dict[str, str]:
        """200 while a new request would be computed at once or soon, else 503 with the reason."""
        require_healthy()
        if service.places.closed:
            raise stopping()
        if engine.state == "rebuilding":
            raise ApiError(503, "the cache is being rebuilt", code="rebuilding")
        return {"status": "ready"}

    return router
