"""GET /v1/models: the one model that is served."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fastapi import APIRouter

from kvq_cli.quoting import quoted
from kvq_cli.server import errors
from kvq_cli.server.answers import Model, ModelList

if TYPE_CHECKING:
    from kvq_cli.engine.async_engine import AsyncEngine


def require_served(engine: AsyncEngine, name: str) -> None:
    """Refuse a request for a model that is not served, naming the one that is."""
    if name != engine.model_name:
        raise errors.ApiError(
            404,
            f"the model {quoted(name)} does not exist; this server serves {engine.model_name!r}",
            param="model",
            code="model_not_found",
        )


def routes(engine: AsyncEngine) -> APIRouter:
    """The routes, for one engine."""
    router = APIRouter(tags=["openai"])
    created = int(time.time())

    def model() -> Model:  # its longest request follows the cache's size
        return Model(id=engine.model_name, created=created, max_model_len=engine.max_model_len)

    @router.get("/v1/models")
    async def list_models() -> ModelList:
        """Models that requests may name."""
        return ModelList(data=[model()])

    @router.get("/v1/models/{name:path}", responses={404: errors.ANSWERS[404]})
    async def retrieve_model(name: str) -> Model:
        """One model."""
        require_served(engine, name)
        return model()

    return router
