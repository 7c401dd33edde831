"""`kvq serve`."""

from __future__ import annotations

import typer

from kvq_cli.commands import options as o
from kvq_cli.commands.messages import plain_errors
from kvq_cli.server.address import bind, url


@plain_errors
def serve(
    model: o.ModelArgument = None,
    model_option: o.ModelOption = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    threads: o.Threads = None,
    served_model_name: o.ServedModelName = None,
    kv_cache_dtype: o.CacheDtype = "auto",
    kv_cache_iso: o.CacheIso = None,
    num_tokens: o.NumTokens = None,
    num_pages: o.NumPages = None,
    memory_ratio: o.MemoryRatio = None,
    page_tokens: o.PageTokens = 16,
    cache_type: o.CacheType = "prefix",
    state_snapshots: o.StateSnapshots = None,
    attention_backend: o.AttentionBackend = "auto",
    on_failed_check: o.OnFailedCheck = "refuse",
    max_model_len: o.MaxModelLen = None,
    max_running_requests: o.MaxRunningRequests = 16,
    max_queued_requests: o.MaxQueuedRequests = 256,
    request_timeout: o.RequestTimeout = None,
    max_prefill_tokens: o.MaxPrefillTokens = 512,
    prefill_reads: o.PrefillReads = "own",
    prefill_scratch_mb: o.PrefillScratch = 128,
    cuda_graph_max_bs: o.GraphRows = None,
    cuda_graph_max_prefill_tokens: o.GraphTokens = None,
    compile: o.Compile = False,
    host: o.Host = "127.0.0.1",
    port: o.Port = 1919,
    api_key: o.ApiKey = None,
    max_body_mib: o.MaxBodyMib = 16,
) -> None:
    """Serve a model over HTTP as OpenAI's API does. Ctrl-C ends it."""
    if (model is None) == (model_option is None):
        raise typer.BadParameter("give one model, as argument or with --model", param_hint="MODEL")
    listener = bind(host, port)  # first of all: a taken port is known before the model loads

    from kvq_cli import compose
    from kvq_cli.commands.screen import Screen
    from kvq_cli.serve_options import cache_format
    from kvq_cli.server import run
    from kvq_cli.server.limits import HttpOptions

    screen = Screen()
    http = HttpOptions(
        api_key=api_key,
        max_queued_requests=max_queued_requests,
        max_body_bytes=max_body_mib << 20,
        request_timeout=request_timeout,
    )
    wanted = compose.ServeOptions(
        model=model or model_option or "",
        kv_cache_dtype=cache_format(kv_cache_dtype, kv_cache_iso),
        dtype=dtype,
        device=device,
        num_tokens=num_tokens,
        num_pages=num_pages,
        max_model_len=max_model_len,
        memory_ratio=memory_ratio,
        page_tokens=page_tokens,
        max_running_requests=max_running_requests,
        max_prefill_tokens=max_prefill_tokens,
        prefill_reads=prefill_reads,
        prefill_scratch_mb=prefill_scratch_mb,
        cuda_graph_max_bs=cuda_graph_max_bs,
        cuda_graph_max_prefill_tokens=cuda_graph_max_prefill_tokens,
        compile=compile,
        attention_backend=attention_backend,
        on_failed_check=on_failed_check,
        cache_type=cache_type,
        state_snapshots=state_snapshots,
        served_model_name=served_model_name,
        threads=threads,
    )
    with listener:
        with screen.progress() as progress:
            engine = compose.build_engine(wanted, screen.say, progress)
        reached = url(host, listener)
        run.serve(engine, listener, lambda: screen.announce(engine, reached, http), http)
    screen.say("stopped")
