"""The options of `kvq plan`: their names, units and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A directory with config.json, a .gguf file, or 'demo'. Weights are not needed.",
        show_default=False,
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A config.json instead of MODEL.", show_default=False),
]
BudgetSize = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help="Memory for cache and workspace, of one GPU: 8GiB, 500MiB, 80GB. "
        "Weights are not counted: take them off first.",
        show_default=False,
    ),
]
CacheDtypes = Annotated[
    list[str] | None,
    typer.Option(
        "--kv-cache-dtype",
        metavar="CODEC|k=CODEC,v=CODEC|LAYERS:FORMAT,…",
        help="One more format to plan; may be given several times. "
        "Layer by layer: 0-1:bf16,2-:k=q8_0,v=q4_0.",
        show_default=False,
    ),
]
Lengths = Annotated[
    str,
    typer.Option(
        metavar="TOKENS,…", help="Requests of which lengths are counted: 8192, 32k (32,000), 8ki."
    ),
]
PageTokens = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        min=1,
        help="Tokens a page. Default: 16, or 64 where tokens share index keys.",
        show_default=False,
    ),
]
MaxRunningRequests = Annotated[
    int,
    typer.Option(
        metavar="REQUESTS",
        min=1,
        help="Requests that run at once: windows, states and logits are kept for as many.",
    ),
]
StateSnapshots = Annotated[
    int | None,
    typer.Option(
        metavar="STATES",
        min=0,
        help="As `kvq serve` takes it, of models with linear-attention layers. "
        "Default: as many as requests run at once, 4 at least.",
        show_default=False,
    ),
]
MaxPrefillTokens = Annotated[
    int,
    typer.Option(metavar="TOKENS", min=1, help="Most prompt tokens computed in one step."),
]
PrefillScratch = Annotated[
    int,
    typer.Option(
        "--prefill-scratch-mb", metavar="MIB", min=0, help="As `kvq serve` takes it; 0: none."
    ),
]
TensorParallel = Annotated[
    int,
    typer.Option(
        "--tp",
        metavar="RANKS",
        min=1,
        help="GPUs that share the heads; the budget and all figures are of one of them.",
    ),
]
WorkspaceSize = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="What computing takes at its peak, if you know it. "
        "Default: an upper estimate for kvq's attention.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Plot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.svg", help="Also draw the tokens that fit as an SVG.", show_default=False
    ),
]
