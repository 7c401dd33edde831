"""`kvq ctl`: what is asked of a server that runs."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from kvq_cli.commands.absent import Command
from kvq_cli.commands.messages import plain_errors
from kvq_cli.commands.options import CtlApiKey, CtlCacheDtype, CtlTokens, Url

app = typer.Typer(help="Ask and change a running `kvq serve`.", no_args_is_help=True)

DEFAULT_URL = "http://127.0.0.1:1919"


@app.command(cls=Command)
@plain_errors
def cache(
    tokens: CtlTokens = None,
    kv_cache_dtype: CtlCacheDtype = None,
    url: Url = DEFAULT_URL,
    api_key: CtlApiKey = None,
) -> None:
    """Change the size or the format of the cache while the server runs.

    Requests wait a moment and none is lost; what fits is kept.
    """
    from kvq_cli.commands import client
    from kvq_cli.commands.cache_facts import change
    from kvq_cli.commands.screen import Screen
    from kvq_cli.commands.sizes import parse_tokens

    if tokens is None and kv_cache_dtype is None:
        raise typer.BadParameter("give a size, a format or both", param_hint="--tokens")
    wanted = None if tokens is None else parse_tokens(tokens)
    screen, body = Screen(), dict[str, Any]()
    if wanted is not None:
        page_tokens = client.status(url, api_key)["page_tokens"]
        num_tokens = -(-wanted // page_tokens) * page_tokens
        if num_tokens != wanted:
            screen.say(f"{wanted:,} tokens become {num_tokens:,}: a page holds {page_tokens}")
        body["num_tokens"] = num_tokens
    if kv_cache_dtype is not None:
        body["kv_cache_dtype"] = kv_cache_dtype
    screen.show(change(client.rebuild(url, body, api_key)))


@app.command()
@plain_errors
def stats(
    url: Url = DEFAULT_URL,
    api_key: CtlApiKey = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the server's JSON instead of a table.")
    ] = False,
) -> None:
    """Show what the cache of a running server costs and holds."""
    from kvq_cli.commands import client
    from kvq_cli.commands.cache_facts import status
    from kvq_cli.commands.screen import Screen

    found = client.status(url, api_key)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        Screen().show(status(url, found))
