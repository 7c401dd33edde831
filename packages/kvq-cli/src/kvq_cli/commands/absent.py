"""Options that other servers have and kvq has not: what to do instead, before anything begins."""

from __future__ import annotations

import typer
from typer.core import TyperCommand

ONE_DEVICE = (
    "kvq serves and rebuilds on one device; nothing is divided among several. `kvq plan --tp` "
    "works out what each of them would hold"
)
ONE_PLACE = (
    "a cache is in one memory whole, nothing of it moves to the host or to a disk. What does not "
    "fit does with fewer tokens (--num-tokens, --max-model-len) or in a smaller format "
    "(--kv-cache-dtype)"
)
ABSENT = {
    "--tp": ONE_DEVICE,
    "--tp-size": ONE_DEVICE,
    "--tensor-parallel-size": ONE_DEVICE,
    "--pipeline-parallel-size": ONE_DEVICE,
    "--data-parallel-size": ONE_DEVICE,
    "--cpu-offload-gb": ONE_PLACE,
    "--swap-space": ONE_PLACE,
    "--kv-offloading-size": ONE_PLACE,
    "--enable-hierarchical-cache": ONE_PLACE,
    "--no-kv-offload": ONE_PLACE,
}


class Command(TyperCommand):
    """A command that knows what it lacks."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        for argument in args:
            name = argument.partition("=")[0]
            if name in ABSENT:
                raise typer.BadParameter(ABSENT[name], param_hint=name)
        return super().parse_args(ctx, args)
