"""The options of `kvq serve` and `kvq ctl`: their names, units and help."""

from __future__ import annotations

from typing import Annotated

import typer

MODEL, CACHE, LIMITS, NETWORK = "Model", "Cache", "Requests", "Network"

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A directory with config.json and *.safetensors, a .gguf file, or 'demo' "
        "(SmolLM2-135M-Instruct from its package). Nothing is downloaded.",
        show_default=False,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="PATH|demo",
        help="The same as the argument MODEL.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="auto|float32|bfloat16|float16",
        help="Type of the weights and of what is computed with them. "
        "auto: float32 on a CPU, the model's own on a GPU.",
        rich_help_panel=MODEL,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="auto|cpu|cuda",
        help="Where the model and its cache live. auto: cuda if torch finds it, else cpu.",
        rich_help_panel=MODEL,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        metavar="THREADS",
        help="Threads that a CPU computes with; fewer where others keep its cores busy. Default: "
        "as many cores as the process may use.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
ServedModelName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The name that requests must give. Default: the directory's or file's name.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
CacheDtype = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype",
        metavar="auto|CODEC|k=CODEC,v=CODEC|LAYERS:FORMAT,…",
        help="Format of cached keys and values; `kvq formats` lists the codecs. auto: what the "
        "checkpoint declares for its KV cache; or else bf16 where the longest request fits in it, "
        "q8_0 where it does not, and a smaller one where --max-model-len or a size asks for what "
        "fits in no larger; by the model's own figures where kvq eval has measured it. Layer by "
        "layer: 0-1:bf16,2-:k=q8_0,v=q4_0.",
        rich_help_panel=CACHE,
    ),
]
CacheIso = Annotated[
    str | None,
    typer.Option(
        "--kv-cache-iso",
        metavar="iso3|iso4",
        help="The same as --kv-cache-dtype of one of the rotated codecs.",
        show_default=False,
        rich_help_panel=CACHE,
    ),
]
NumTokens = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        help="Size of the cache, a multiple of --page-tokens. "
        "Default: what the requests can use, within --memory-ratio.",
        show_default=False,
        rich_help_panel=CACHE,
    ),
]
NumPages = Annotated[
    int | None,
    typer.Option(
        metavar="PAGES",
        help="The same in pages of --page-tokens; one of the two at most.",
        show_default=False,
        rich_help_panel=CACHE,
    ),
]
MemoryRatio = Annotated[
    float | None,
    typer.Option(
        metavar="RATIO",
        help="Share of the free memory that weights, workspace and cache may take together. "
        "Default: 0.6 on a CPU, 0.9 on a GPU.",
        show_default=False,
        rich_help_panel=CACHE,
    ),
]
PageTokens = Annotated[
    int, typer.Option(metavar="TOKENS", help="Tokens a page.", rich_help_panel=CACHE)
]
CacheType = Annotated[
    str,
    typer.Option(
        metavar="prefix|none",
        help="prefix: pages of computed tokens stay, until their room is needed, for requests that "
        "begin with the same tokens. none: every request is computed whole.",
        rich_help_panel=CACHE,
    ),
]
StateSnapshots = Annotated[
    int | None,
    typer.Option(
        metavar="STATES",
        min=0,
        help="Of models with linear-attention layers: states that are kept with cached pages, for "
        "requests that begin with the same tokens. 0: each is computed whole. Default: as many as "
        "--max-running-requests, 4 at least.",
        rich_help_panel=CACHE,
        show_default=False,
    ),
]
AttentionBackend = Annotated[
    str,
    typer.Option(
        metavar="auto|cuda|triton|reference|OP=BACKEND,…",
        help="What computes attention over the cache. auto: for each operation the fastest that "
        "serves the model. A name serves the whole model or is refused; decode=cuda names one for "
        "an operation and leaves the others to auto. `kvq check` tries them.",
        rich_help_panel=CACHE,
    ),
]
OnFailedCheck = Annotated[
    str,
    typer.Option(
        metavar="refuse|fallback",
        help="What comes of a kernel that, tried at the start, does not compute what it must. "
        "refuse: kvq says which and does not serve. fallback: the next backend that passes takes "
        "its place, and the start, `kvq ctl stats` and /v1/kv/status say so.",
        rich_help_panel=CACHE,
    ),
]
CheckBackend = Annotated[
    str,
    typer.Option(
        metavar="auto|cuda|triton|reference|OP=BACKEND,…",
        help="What is tried. auto: for each operation what `kvq serve` would take.",
    ),
]
CheckCacheDtypes = Annotated[
    list[str] | None,
    typer.Option(
        "--kv-cache-dtype",
        metavar="CODEC|k=CODEC,v=CODEC|LAYERS:FORMAT,…",
        help="A format to try; may be given several times. Layer by layer with a MODEL only. "
        "Default: every codec; of a MODEL, the one that `kvq serve` takes by itself.",
        show_default=False,
    ),
]
CheckDtype = Annotated[
    str,
    typer.Option(
        metavar="auto|float32|bfloat16|float16",
        help="Type of what attention is computed with. auto: float32 on a CPU; on a GPU the "
        "MODEL's own, or bfloat16.",
    ),
]
CheckPrefillReads = Annotated[
    str | None,
    typer.Option(
        metavar="own|packed",
        help="Of a MODEL: as `kvq serve` takes it. Default: own.",
        show_default=False,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        help="Longest request, prompt and answer together. Default: what the model was made for.",
        show_default=False,
        rich_help_panel=LIMITS,
    ),
]
MaxRunningRequests = Annotated[
    int,
    typer.Option(
        metavar="REQUESTS",
        help="Most answers computed at the same time; others wait.",
        rich_help_panel=LIMITS,
    ),
]
MaxPrefillTokens = Annotated[
    int,
    typer.Option(
        metavar="TOKENS",
        help="Most prompt tokens computed in one step: fewer keep other requests' answers flowing.",
        rich_help_panel=LIMITS,
    ),
]
MaxQueuedRequests = Annotated[
    int,
    typer.Option(
        metavar="REQUESTS",
        min=0,
        help="Most answers that wait beside those being computed; more are refused with 429 and "
        "the time after which to try again.",
        rich_help_panel=LIMITS,
    ),
]
RequestTimeout = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Most seconds that an answer may take, waiting included. Default: any.",
        show_default=False,
        rich_help_panel=LIMITS,
    ),
]
PrefillReads = Annotated[
    str,
    typer.Option(
        metavar="own|packed",
        help="What the tokens of a prompt see of those computed in the same step. own: their keys "
        "and values as they came, without the cache's rounding. packed: what later tokens will "
        "see, so that the cut of a prompt into steps does not matter.",
        rich_help_panel=LIMITS,
    ),
]
PrefillScratch = Annotated[
    int,
    typer.Option(
        "--prefill-scratch-mb",
        metavar="MIB",
        help="Memory of a GPU in which a prompt's chunk may decode the cached tokens before it "
        "once, for all of its own; the workspace counts it. A small one is filled in turns. "
        "0: none, each tile of a chunk decodes them anew.",
        rich_help_panel=LIMITS,
    ),
]
GraphRows = Annotated[
    int | None,
    typer.Option(
        "--cuda-graph-max-bs",
        metavar="N",
        help="Replay steps of up to so many decodes, and no prompts, from CUDA graphs, which are "
        "made at the start: a host's launches then cost next to nothing. 0: none. Without it as "
        "many as may run, 64 at most, on a GPU.",
        show_default=False,
        rich_help_panel=LIMITS,
    ),
]
GraphTokens = Annotated[
    int | None,
    typer.Option(
        "--cuda-graph-max-prefill-tokens",
        metavar="N",
        help="Replay steps of one prompt's chunk of up to so many tokens, and no decodes, from "
        "CUDA graphs, which are made at the start. --max-prefill-tokens at most; not with "
        "--prefill-reads packed. 0: none. Without it 1,024 at most, on a GPU, of which those stay "
        "that are measured to be no slower so.",
        show_default=False,
        rich_help_panel=LIMITS,
    ),
]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Compile norms, rotary embedding and the feed-forward's product (torch.compile): "
        "faster decodes on a GPU for some ten seconds more at the first start.",
        rich_help_panel=LIMITS,
    ),
]
Host = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS",
        help="Address to listen on; 0.0.0.0 is every one: give an --api-key then.",
        rich_help_panel=NETWORK,
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        help="What requests must bring as `Authorization: Bearer KEY`; /health and /ready are "
        "open. Default: anyone may ask.",
        show_default=False,
        rich_help_panel=NETWORK,
    ),
]
MaxBodyMib = Annotated[
    int,
    typer.Option(
        metavar="MIB",
        min=1,
        help="Largest body of a request.",
        rich_help_panel=NETWORK,
    ),
]
Port = Annotated[
    int,
    typer.Option(
        metavar="PORT",
        min=0,
        max=65535,
        help="TCP port to listen on; 0 is any free one, which is printed.",
        rich_help_panel=NETWORK,
    ),
]
Url = Annotated[
    str, typer.Option(metavar="URL", help="Where the server listens, as it printed at its start.")
]
CtlApiKey = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        help="The key that the server was given, if it was.",
        show_default=False,
    ),
]
CtlTokens = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="New size of the cache in tokens: 65536, 200k (200,000), 1.5m, 64ki (65,536). "
        "Rounded up to whole pages. Default: as it is.",
        show_default=False,
    ),
]
CtlCacheDtype = Annotated[
    str | None,
    typer.Option(
        "--kv-cache-dtype",
        metavar="CODEC|k=CODEC,v=CODEC|LAYERS:FORMAT,…",
        help="New format of cached keys and values; running requests are computed again in it. "
        "Layer by layer: 0-1:bf16,2-:k=q8_0,v=q4_0. "
        "Default: as it is.",
        show_default=False,
    ),
]
