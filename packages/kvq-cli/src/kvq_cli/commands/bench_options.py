"""The options of `kvq bench`: their names, units and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Codecs = Annotated[
    str | None,
    typer.Option(
        metavar="CODEC,…",
        help="Formats to measure; keys and values apart as k=CODEC,v=CODEC. bf16 is always "
        "measured. Default: every codec that stores the head_dim, and k=q8_0,v=q4_0.",
        show_default=False,
    ),
]
Op = Annotated[
    str,
    typer.Option(
        metavar="decode|extend",
        help="decode: decode, stores and page copies. extend: new tokens over a packed past.",
    ),
]
Cases = Annotated[
    str | None,
    typer.Option(
        metavar="BATCHxCONTEXT,…|NEW+PAST,…",
        help="Steps, the most important first; 8x32k: decode for 8 requests of 32,768 tokens, "
        "2k+8k: extend by 2,048 tokens after 8,192. Default: "
        "8x32k,32x8k,1x128k,128x1k,1x4k,8x4k,32x4k; 2k+8k,256+8k,1k+8k,8k+8k,2k+0,16+32k.",
        show_default=False,
    ),
]
Pages = Annotated[
    str | None,
    typer.Option(metavar="TOKENS,…", help="Tokens a page. Default: 16,64.", show_default=False),
]
LayerShape = Annotated[
    str | None,
    typer.Option(
        metavar="HEADS/KV_HEADSxHEAD_DIM,…",
        help="Layers, the most important first. Default: 32/8x128.",
        show_default=False,
    ),
]
StoreTokens = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS,…",
        help="Tokens of a store. Default: 16384,2048,256,1.",
        show_default=False,
    ),
]
CopyTokens = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS,…",
        help="Tokens whose pages are copied at once. Default: 65536,1024.",
        show_default=False,
    ),
]
Backend = Annotated[
    list[str] | None,
    typer.Option(
        "--attention-backend",
        "--backend",
        metavar="auto|cuda|triton|reference|OP=BACKEND,…",
        help="What runs the operations; given several times, each is measured at what it serves. "
        "Default: auto.",
        show_default=False,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="cuda|cpu",
        help="cpu: tiny shapes that try the command and measure no kernel.",
    ),
]
Repeat = Annotated[
    int | None,
    typer.Option(
        metavar="TIMES",
        help="Timed repetitions, of which the median counts. Default: 30.",
        show_default=False,
    ),
]
BudgetSeconds = Annotated[
    float, typer.Option(metavar="SECONDS", help="No measurement begins after as many.")
]
Jobs = Annotated[
    int | None,
    typer.Option(
        metavar="PROCESSES",
        help="Processes that compile kernels before anything is timed; 0: each when it is needed. "
        "Default: half the cores, at most 8, on a GPU; 0 on a CPU.",
        show_default=False,
    ),
]
Quick = Annotated[
    bool, typer.Option("--quick", help="The first of each list, for bf16, q8_0 and q4_0.")
]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Record every figure there; written after each, so that a run cut off leaves it.",
        show_default=False,
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE.svg", help="Also draw the speeds as an SVG.", show_default=False),
]

EngineModel = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="As `kvq serve` takes it.", show_default=False),
]
RandomSize = Annotated[
    str | None,
    typer.Option(
        metavar="LAYERSxHIDDENxINNER",
        help="Instead of MODEL a Llama of that size whose weights are random: 32x4096x11008.",
        show_default=False,
    ),
]
EngineShape = Annotated[
    str, typer.Option(metavar="HEADS/KV_HEADSxHEAD_DIM", help="Its layers' attention.")
]
EngineFormats = Annotated[
    str,
    typer.Option(
        metavar="CODEC,…", help="Formats of the cache; keys and values apart as k=CODEC,v=CODEC."
    ),
]
Steps = Annotated[
    str,
    typer.Option(
        metavar="BATCHxCONTEXT,NEW+PAST,…",
        help="Steps; 64x1000: a token for each of 64 requests of 1,000, 2k+8k: 2,048 tokens of a "
        "prompt after 8,192.",
    ),
]
EngineDtype = Annotated[
    str, typer.Option(metavar="auto|float32|bfloat16|float16", help="Of weights and queries.")
]
EngineDevice = Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="What computes.")]
EngineBackend = Annotated[
    str, typer.Option("--attention-backend", metavar="NAME", help="As `kvq serve` takes it.")
]
EnginePage = Annotated[int, typer.Option(metavar="TOKENS", min=1, help="Tokens a page.")]
EngineGraphs = Annotated[
    int | None,
    typer.Option(
        "--cuda-graph-max-bs",
        metavar="N",
        min=0,
        help="As `kvq serve` takes it; 0: none.",
        show_default=False,
    ),
]
EngineGraphTokens = Annotated[
    int | None,
    typer.Option(
        "--cuda-graph-max-prefill-tokens",
        metavar="N",
        min=0,
        help="As `kvq serve` takes it; 0: none.",
        show_default=False,
    ),
]
EngineLongest = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        metavar="TOKENS",
        min=1,
        help="Longest request that the engine allows and its CUDA graphs reach, as `kvq serve` "
        "takes it. Default: a case's own.",
        show_default=False,
    ),
]
EngineCompile = Annotated[bool, typer.Option("--compile", help="As `kvq serve` takes it.")]
EnginePeer = Annotated[
    bool,
    typer.Option(
        "--peer",
        help="Also decode and compute whole prompts by transformers' own generate, with its cache, "
        "by SDPA.",
    ),
]
EngineRoutes = Annotated[
    bool,
    typer.Option(
        "--extend-routes",
        help="Also compute prompts over a past by each way that the backend has to read it, in "
        "turn with the one that it chooses.",
    ),
]
EngineRepeat = Annotated[
    int,
    typer.Option(
        metavar="N", min=1, help="Steps that are timed; of prompts 5 at least and 10 at most."
    ),
]
