"""The application: one engine behind every route."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from kvq_cli import __version__
from kvq_cli.server import chat, completions, errors, health, kv, metrics, models
from kvq_cli.server.generation import Service
from kvq_cli.server.latency import Latency
from kvq_cli.server.limits import BodyLimit, HttpOptions, KeyCheck
from kvq_cli.server.places import Places
from kvq_cli.server.tokens import TokenTexts

if TYPE_CHECKING:
    from kvq_cli.engine.async_engine import AsyncEngine


def create_app(engine: AsyncEngine, options: HttpOptions | None = None) -> FastAPI:
    """An OpenAI-compatible application that starts and stops the engine with itself.

    Its `state.places` count the answers that are computed, wait or are being read.
    """
    options = options or HttpOptions()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # a tokenizer settles its own state at its first call; later calls may come from threads
        engine.tokenizer.encode("kvq", add_special_tokens=True, verbose=False)
        engine.start()
        try:
            yield
        finally:
            await engine.stop()

    registry = CollectorRegistry()
    latency = Latency(registry)
    counters = metrics.EngineCollector(engine)
    registry.register(counters)
    registry.register(metrics.VllmNames(engine.model_name, [counters, *latency.collectors]))
    places = Places(engine.max_running_requests, options.max_queued_requests)
    service = Service(
        engine,
        latency,
        places,
        TokenTexts(engine.tokenizer),
        options.request_timeout,
    )
    # the pages that FastAPI would add load their scripts from elsewhere; /openapi.json stays
    app = FastAPI(
        title="kvq",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=errors.KEYED_ANSWERS if options.api_key is not None else None,
    )
    app.state.places = places
    app.include_router(chat.routes(service))
    app.include_router(completions.routes(service))
    app.include_router(models.routes(engine))
    app.include_router(health.routes(service))
    app.include_router(kv.routes(engine))
    app.include_router(metrics.routes(registry))
    errors.install(app)
    errors.describe(app)
    app.add_middleware(BodyLimit, max_bytes=options.max_body_bytes)
    if options.api_key is not None:
        app.add_middleware(KeyCheck, key=options.api_key)  # the last one is asked first
    return app
