"""`kvq serve` as a process, its engine scripted."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import scripted_serve
from http_server import wait_for

PROGRAM = Path(scripted_serve.__file__)


class Process:
    """A `kvq serve`, and what it has said."""

    def __init__(self, *arguments: str, prefix: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, PROGRAM, "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said = ""
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def read(self) -> None:
        for line in self.process.stdout:
            self.said += line

    def wait_for(self, words: str) -> None:
        wait_for(lambda: words in self.said or self.process.poll() is not None, 30)
        assert words in self.said

    @property
    def url(self) -> str:
        self.wait_for("curl ")
        return re.search(r"http://[^/\s]+", self.said).group()

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.end()

    def end(self) -> int:
        code = self.process.wait(20)
        self.reader.join(5)
        return code
