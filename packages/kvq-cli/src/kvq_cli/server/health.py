"""GET /health, for load balancers and start-up scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter

from kvq_cli.engine.params import EngineFailed
from kvq_cli.server import errors

if TYPE_CHECKING:
    from kvq_cli.engine.async_engine import AsyncEngine


def routes(engine: AsyncEngine) -> APIRouter:
    """The route, for one engine."""
    router = APIRouter(tags=["operation"])

    @router.get("/health", responses={503: errors.ANSWERS[503]})
    async def health() -> dict[str, str]:
        """200 while requests are served, else 503 with the reason."""
        if not engine.healthy:
            raise EngineFailed(engine.failure or "it is not running")
        return {"status": "ok"}

    return router
