"""What the commands show: progress, what a server serves, how to ask it."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from kvq_cli import __version__

if TYPE_CHECKING:
    from kvq_cli.engine.async_engine import AsyncEngine
    from kvq_cli.engine.params import EngineSummary, TierStats
    from kvq_cli.server.limits import HttpOptions

WIDE = 1000


class Screen:
    """Standard output."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)

    def say(self, message: str) -> None:
        """One line."""
        self._console.print(Text(message), soft_wrap=True)

    def show(self, facts: Panel) -> None:
        """A panel."""
        self._console.print(facts)

    def table(self, title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
        """Cells as text, the first column's to the left."""
        shown = Table(title=title, title_justify="left")
        for n, column in enumerate(columns):
            shown.add_column(column, justify="right" if n else "left")
        for row in rows:
            shown.add_row(*row)
        # Into a file or a pipe it goes whole; a terminal is as wide as it is.
        console = self._console
        if not console.is_terminal:
            console = Console(highlight=False, width=WIDE)
        console.print(shown, crop=False)

    @contextmanager
    def progress(self) -> Iterator[Callable[[str, int, int], None]]:
        """A function that takes (description, done, total) and draws a bar for each description."""
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
        )
        tasks: dict[str, TaskID] = {}
        with Progress(*columns, console=self._console, transient=True) as bars:

            def tell(description: str, done: int, total: int) -> None:
                if description not in tasks:
                    tasks[description] = bars.add_task(description)
                bars.update(tasks[description], completed=done, total=total)

            yield tell

    def announce(self, engine: AsyncEngine, url: str, http: HttpOptions) -> None:
        """That the server is up: what it serves, its URL, and a command that asks it something."""
        at_once = f"{engine.max_running_requests:,} answers; {http.max_queued_requests:,} more wait"
        self._console.print(panel(engine.summary, at_once, engine.stats().tiers))
        self.say(f"{url} (Ctrl-C stops it). Ask it something:")
        chats = engine.tokenizer.chat_template is not None
        self.say(curl(url, engine.model_name, chats=chats, keyed=http.api_key is not None))


def panel(
    summary: EngineSummary, at_once: str | None = None, tiers: Sequence[TierStats] = ()
) -> Panel:
    """What the engine serves and what its cache costs."""
    parts = Counter[str]()
    for tier in tiers:
        for each in tier.stored:
            parts[each.name] += each.nbytes
    of_each = ", ".join(f"{name} {mebibytes(nbytes)}" for name, nbytes in parts.items())
    return framed(
        f"kvq {__version__}",
        [
            ("model", summary.model_name),
            ("cache", summary.cache_dtype),
            ("token", token_price(summary.bytes_per_token, summary.bf16_bytes_per_token)),
            (
                "room",
                f"{summary.num_tokens:,} tokens in {mebibytes(summary.cache_bytes)}"
                f"{of_each and f' ({of_each})'}; "
                f"bf16 would hold {summary.bf16_num_tokens:,}",
            ),
            *_states(summary),
            ("longest request", f"{summary.max_model_len:,} tokens, prompt and answer together"),
            *([("at once", at_once)] if at_once else []),
            ("attention", served_by(summary.attention)),
            *([("checked", str(check))] if (check := summary.attention_check) else []),
            ("weights", summary.weights),
            *(("note", note) for note in summary.notes),
        ],
    )


def _states(summary: EngineSummary) -> list[tuple[str, str]]:
    """What linear-attention layers take beside the cache."""
    if not summary.states:
        return []
    count = summary.states + summary.snapshots
    return [
        (
            "states",
            f"{mebibytes(count * summary.state_bytes)}: {summary.states:,} of running requests and "
            f"{summary.snapshots:,} snapshots beside cached pages, "
            f"{mebibytes(summary.state_bytes)} each",
        )
    ]


def framed(title: str, facts: Iterable[tuple[str, str]]) -> Panel:
    """Facts by name."""
    grid = Table.grid(padding=(0, 2))
    for name, fact in facts:
        grid.add_row(Text(name, style="yellow" if name == "note" else "dim"), Text(fact))
    return Panel(grid, title=title, expand=False)


def served_by(attention: Mapping[str, str]) -> str:
    """The backend of each op; of all of them, if it is one."""
    backends = set(attention.values())
    return backends.pop() if len(backends) == 1 else ", ".join(map(" ".join, attention.items()))


def token_price(token_bytes: float, bf16_bytes: float) -> str:
    """What a token costs beside bf16."""
    return f"{token_bytes:,.10g} bytes, {token_bytes / bf16_bytes:.1%} of bf16's {bf16_bytes:,.10g}"


def mebibytes(nbytes: int) -> str:
    """Bytes in the unit of caches."""
    return f"{nbytes / 2**20:,.1f} MiB"


def curl(url: str, model: str, *, chats: bool, keyed: bool = False) -> str:
    """A shell command that asks the server something; a key is for the user to fill in."""
    if chats:
        path = "/v1/chat/completions"
        ask: dict[str, object] = {"messages": [{"role": "user", "content": "Name three rivers."}]}
    else:
        path = "/v1/completions"
        ask = {"prompt": "The longest rivers of the world are"}
    body = json.dumps({"model": model, **ask, "max_tokens": 64})
    headers = ["Content-Type: application/json", *(["Authorization: Bearer KEY"] if keyed else [])]
    given = " ".join(f"-H {shlex.quote(header)}" for header in headers)
    return f"curl {shlex.quote(url + path)} {given} -d {shlex.quote(body)}"
