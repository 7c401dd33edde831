"""`kvq eval` from options to a finished record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

import kvq_codecs
from kvq_cli import __version__, machine
from kvq_cli.choosing import checked_cache, choose_cache
from kvq_cli.config import (
    CacheFormat,
    CacheFormatError,
    ConfigError,
    Formats,
    ModelGeometry,
    check_format,
    check_servable,
    geometry,
    parse_formats,
    split_formats,
)
from kvq_cli.engine.cache import CacheChoice
from kvq_cli.evaluation import evidence
from kvq_cli.evaluation import record as records
from kvq_cli.evaluation.claim import claimed
from kvq_cli.evaluation.evaluator import REFERENCE, Evaluator, Progress
from kvq_cli.evaluation.fingerprint import fingerprint
from kvq_cli.evaluation.material import Material
from kvq_cli.evaluation.needles import NoRoomError
from kvq_cli.evaluation.texts import Text, read_text, tokenize
from kvq_cli.models import attention, rotary
from kvq_cli.models.loader import LoadedModel, load, read_config
from kvq_cli.models.source import resolve
from kvq_cli.serve_options import ServeOptions

CONTEXT = 1024
# Keys are the ones that mind; whether a rotation helps on either side is measured, not assumed.
PAIRS = (("q8_0", "q4_0"), ("q8_0", "iso4"), ("iso4", "q8_0"))
SHORTEST = 128  # tokens of a context: half of one holds a needle


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What a user chose.

    Attributes
    ----------
    formats : as `split_formats` takes them; none = every codec that stores the model's rows, and
        the pairs
    text : a file of plain text
    tokens : of the text that are evaluated; None = up to 4,096, as the text allows
    context : tokens of each piece of it; None = 1,024, or what the model was made for
    chunk_tokens : computed in one step
    threads : that a CPU computes with; None = as many as the process may run at once
    record : a file that is continued when it exists
    """

    model: str
    text: Path
    formats: Sequence[str] = ()
    tokens: int | None = None
    context: int | None = None
    chunk_tokens: int = 256
    page_tokens: int = 16
    dtype: str = "auto"
    device: str = "auto"
    attention_backend: str = "auto"
    threads: int | None = None
    record: Path | None = None

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("context", SHORTEST)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")

    @property
    def served(self) -> ServeOptions:
        """The same, as a server would be asked for it."""
        return ServeOptions(
            self.model,
            page_tokens=self.page_tokens,
            max_prefill_tokens=self.chunk_tokens,
            prefill_reads="packed",
            attention_backend=self.attention_backend,
        )


@dataclass(slots=True)
class Session:
    """An evaluation that runs, and its record so far.

    Attributes
    ----------
    material : that was cut before the model's weights were read
    """

    record: dict[str, Any] = field(default_factory=dict)
    material: Material | None = None

    def run(
        self,
        options: EvalOptions,
        report: Callable[[str], None] = lambda _: None,
        progress: Progress = lambda *_: None,
    ) -> None:
        """Measure what the record lacks. All that can be refused is refused before weights load."""
        if options.record is not None:
            records.check_place(options.record)
        with claimed(options.record):
            self._run(options, report, progress)

    def _run(self, options: EvalOptions, report: Callable[[str], None], progress: Progress) -> None:
        text = read_text(options.text)
        source = resolve(options.model)
        config = read_config(source)
        shape = geometry(config.to_dict())
        check_servable(shape)
        torch.set_num_threads(machine.choose_threads(options.threads))
        device = machine.choose_device(options.device)
        dtype = machine.choose_dtype(options.dtype, device, config)
        if shape.max_position < SHORTEST:
            raise ConfigError(
                f"the model was made for {shape.max_position} positions, and the shortest context "
                f"that is evaluated has {SHORTEST}: it is too short to be evaluated"
            )
        context = options.context or min(CONTEXT, shape.max_position)
        if context > shape.max_position:
            raise ConfigError(
                f"context {context} exceeds the {shape.max_position} positions the model was made "
                f"for; use at most {shape.max_position}"
            )
        formats = wanted_formats(options.formats, shape)
        if options.record is not None:  # what is another evaluation's is known before it loads
            known = {"model": {"name": source.name}, **_settings(options, text, context)}
            records.finished(options.record, {**known, "software": _software()})

        def choose(name: str) -> CacheChoice:
            return choose_cache(name, shape, options.served, device, dtype)

        for each in formats:
            choose(str(each))
        report(f"loading {source.name} ({options.model})")

        def cut(tokenizer: Any) -> None:
            self.material = _material(tokenizer, text, options, context, shape)

        loaded = load(source, dtype=dtype, device=device, progress=progress, check=cut)
        attention.install(loaded.model)
        rotary.settle(loaded.model, context)
        try:
            self.evaluate(
                loaded,
                text,
                options,
                formats,
                context,
                lambda name: checked_cache(choose(name), shape, options.served, device, dtype),
                progress,
            )
        finally:  # what is finished is evidence, whatever ended the rest
            if self.record.get("rows"):
                evidence.keep(source.path, self.record, report)

    def evaluate(
        self,
        loaded: LoadedModel,
        text: Text,
        options: EvalOptions,
        formats: Sequence[Formats],
        context: int,
        choose: Callable[[str], CacheChoice],
        progress: Progress = lambda *_: None,
    ) -> None:
        """The same with a model that is loaded and attends through kvq."""
        material = self.material or _material(
            loaded.tokenizer, text, options, context, loaded.geometry
        )
        settings = _settings(options, text, context)
        about = {
            "kind": records.KIND,
            "model": {"name": loaded.name, "fingerprint": fingerprint(loaded.model)},
            **settings,
            "text": {**settings["text"], "tokens": sum(map(len, material.windows))},
            "computed": _computed(loaded.model),
            "software": _software(),
        }
        rows = records.finished(options.record, about) if options.record is not None else {}
        names = dict.fromkeys((REFERENCE, *map(str, formats)))
        evaluator = Evaluator(
            loaded.model,
            loaded.tokenizer,
            loaded.geometry,
            material,
            choose,
            chunk_tokens=options.chunk_tokens,
            tell=progress,
        )
        # a file that cannot be written is known before anything is computed
        self._keep(about, rows, names, options.record)
        for row in evaluator.run(formats, finished=rows.keys()):
            rows[row["format"]] = row
            self._keep(about, rows, names, options.record)

    def _keep(
        self,
        about: dict[str, Any],
        rows: dict[str, dict[str, Any]],
        names: dict[str, None],
        path: Path | None,
    ) -> None:
        """The record, in the order that was asked for; then what it had besides."""
        order = [name for name in names if name in rows]
        order += [name for name in rows if name not in names]
        self.record = {**about, "rows": [rows[name] for name in order]}
        if path is not None:
            records.write(path, self.record)


def wanted_formats(texts: Sequence[str], shape: ModelGeometry) -> list[Formats]:
    """The formats that a command line names, or every one that stores the model's rows."""
    named = [parse_formats(one, shape) for text in texts for one in split_formats(text)]
    if named:
        for each in named:
            check_format(shape, each)
        return list({str(each): each for each in named}.values())
    found: list[Formats] = []
    codecs = ((name, name) for name in kvq_codecs.names())
    for k, v in (*codecs, *PAIRS):
        try:
            check_format(shape, CacheFormat(k, v))
        except CacheFormatError:
            continue
        found.append(CacheFormat(k, v))
    return found


def _settings(options: EvalOptions, text: Text, context: int) -> dict[str, Any]:
    """What a record says of an evaluation that is known before the model is loaded."""
    return {
        "text": {"name": text.name, "sha256": text.sha256},
        "context": context,
        "chunk_tokens": options.chunk_tokens,
        "page_tokens": options.page_tokens,
    }


def _software() -> dict[str, str]:
    return {
        "kvq": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _material(
    tokenizer: Any, text: Text, options: EvalOptions, context: int, shape: ModelGeometry
) -> Material:
    """What every format is given. ConfigError where the text, or the model, is too short."""
    tokens = tokenize(tokenizer, text)
    try:
        return Material.cut(tokenizer, tokens, context=context, num_tokens=options.tokens)
    except NoRoomError as error:
        least = 2 * error.needed  # the shorter needles take half a context
        if least <= shape.max_position:
            raise
        raise ConfigError(
            f"the model was made for {shape.max_position} positions, and with its tokenizer a "
            f"context of {least} is the shortest that is evaluated: it is too short"
        ) from error


def _computed(model: Any) -> str:
    """By what, in words: results of other devices and types differ."""
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return f"{dtype} on {model.device.type}"
