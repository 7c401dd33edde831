"""What is measured, as names that the command line takes and the record holds."""

from __future__ import annotations

import re
from dataclasses import dataclass

import kvq_codecs
from kvq_attention.errors import AttentionError

KIBI = 1024


@dataclass(frozen=True, slots=True)
class Case:
    """One decode step: `batch` requests with `context` tokens each, one query token a request."""

    batch: int
    context: int

    @property
    def name(self) -> str:
        """Such as 8x32k, where k is 1,024 tokens."""
        return f"{self.batch}x{_counted(self.context)}"

    @property
    def tokens(self) -> int:
        """Tokens in the cache, all requests'."""
        return self.batch * self.context


@dataclass(frozen=True, slots=True)
class Extend:
    """One extend step: a request's `tokens` new ones, with `past` packed tokens before them."""

    tokens: int
    past: int

    @property
    def name(self) -> str:
        """Such as 2k+8k, where k is 1,024 tokens."""
        return "+".join(map(_counted, (self.tokens, self.past)))

    @property
    def context(self) -> int:
        """Tokens that the last one sees."""
        return self.tokens + self.past

    def flops(self, shape: Shape) -> int:
        """Of the two products, for what each query sees."""
        seen = self.tokens * self.past + self.tokens * (self.tokens + 1) // 2
        return 4 * shape.heads * shape.dim * seen


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer: query heads, KV heads, values a row."""

    heads: int
    kv_heads: int
    dim: int

    @property
    def name(self) -> str:
        """Such as 32/8x128."""
        return f"{self.heads}/{self.kv_heads}x{self.dim}"


@dataclass(frozen=True, slots=True)
class Formats:
    """The codecs of K and of V."""

    k: str
    v: str

    @property
    def name(self) -> str:
        """The codec, or k=CODEC,v=CODEC."""
        return self.k if self.k == self.v else f"k={self.k},v={self.v}"

    def token_bytes(self, shape: Shape) -> int:
        """Bytes that one token's K and V take in the cache."""
        rows = (kvq_codecs.get(name).spec.row_bytes(shape.dim) for name in (self.k, self.v))
        return shape.kv_heads * sum(rows)


@dataclass(frozen=True, slots=True)
class Spot:
    """Where ops are measured: a layer whose cache has these formats in pages of so many tokens."""

    shape: Shape
    page_tokens: int
    formats: Formats


def parse_cases(text: str) -> tuple[Case, ...]:
    """BATCHxCONTEXT, separated by commas; a context may end in k (1,024 tokens)."""
    cases = []
    for part in _parts(text, "cases"):
        found = re.fullmatch(r"([1-9]\d{0,17})[x×]([1-9]\d{0,17})(k?)", part)
        if found is None:
            raise AttentionError(
                f"case {part!r} must be BATCHxCONTEXT, such as 8x32k (k is 1,024 tokens) or 4x500"
            )
        cases.append(Case(int(found[1]), int(found[2]) * (KIBI if found[3] else 1)))
    return tuple(dict.fromkeys(cases))


def parse_extends(text: str) -> tuple[Extend, ...]:
    """NEW+PAST tokens, separated by commas; either may end in k (1,024 tokens)."""
    cases = []
    for part in _parts(text, "cases"):
        found = re.fullmatch(r"([1-9]\d{0,17})(k?)\+(0|[1-9]\d{0,17})(k?)", part)
        if found is None:
            raise AttentionError(
                f"case {part!r} of extend must be NEW+PAST, such as 2k+8k: 2,048 tokens after 8,192"
            )
        new, past = (int(found[i]) * (KIBI if found[i + 1] else 1) for i in (1, 3))
        cases.append(Extend(new, past))
    return tuple(dict.fromkeys(cases))


def parse_shape(text: str) -> Shape:
    """HEADS/KV_HEADSxHEAD_DIM."""
    found = re.fullmatch(r"([1-9]\d{0,17})/([1-9]\d{0,17})[x×]([1-9]\d{0,17})", text.strip())
    if found is None or int(found[1]) % int(found[2]):
        raise AttentionError(
            f"shape {text!r} must be HEADS/KV_HEADSxHEAD_DIM, such as 32/8x128, with HEADS a "
            "multiple of KV_HEADS"
        )
    return Shape(int(found[1]), int(found[2]), int(found[3]))


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """HEADS/KV_HEADSxHEAD_DIM, separated by commas."""
    return tuple(dict.fromkeys(map(parse_shape, _parts(text, "shape"))))


def parse_formats(text: str) -> tuple[Formats, ...]:
    """Codecs separated by commas, K and V apart as k=CODEC,v=CODEC; unknown ones are refused."""
    found = []
    for part in re.findall(r"k=[^,]*,\s*v=[^,]*|[^,]+", text):
        pair = re.fullmatch(r"k=(.*),\s*v=(.*)", part.strip())
        k, v = pair.groups() if pair else (part.strip(), part.strip())
        found.append(Formats(kvq_codecs.get(k.strip()).name, kvq_codecs.get(v.strip()).name))
    if not found:
        raise AttentionError(f"codecs {text!r} names none; there are {_known()}")
    return tuple(dict.fromkeys(found))


def parse_counts(text: str, what: str) -> tuple[int, ...]:
    """Positive integers separated by commas."""
    parts = _parts(text, what)
    if not all(re.fullmatch(r"[1-9]\d{0,17}", part) for part in parts):
        raise AttentionError(f"{what} {text!r} must be positive integers separated by commas")
    return tuple(dict.fromkeys(map(int, parts)))


def _counted(tokens: int) -> str:
    return f"{tokens // KIBI}k" if tokens and tokens % KIBI == 0 else str(tokens)


def _parts(text: str, what: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise AttentionError(f"{what} {text!r} names none")
    return parts


def _known() -> str:
    return ", ".join(kvq_codecs.names())
