"""The cache of the running server: what it holds and costs, and its change of size or format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter

from kvq_cli.server import errors
from kvq_cli.server.kv_protocol import Rebuild, RebuildRequest, Status

if TYPE_CHECKING:
    from kvq_cli.engine.async_engine import AsyncEngine


def routes(engine: AsyncEngine) -> APIRouter:
    """The routes, for one engine."""
    router = APIRouter(tags=["operation"])

    @router.get("/v1/kv/status")
    async def kv_status() -> Status:
        """Size, price, pages and state of the cache after the engine's last step."""
        return Status.of(engine.state, engine.failure, *engine.snapshot)

    @router.post("/v1/kv/rebuild", responses=errors.REBUILD_ANSWERS)
    async def kv_rebuild(body: RebuildRequest) -> Rebuild:
        """Another size or format of the cache; requests wait meanwhile and none is lost."""
        return Rebuild.of(await engine.rebuild(body.num_tokens, body.kv_cache_dtype))

    return router
