"""What a call needs of a backend, and the claims that cover it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Need:
    """What one call needs.

    Attributes
    ----------
    op : one of OPS
    k, v : codec names
    k_dim, v_dim : values a row (head_dim)
    page_tokens : tokens a page
    device : torch device type
    features : "plain" and the optional parts in use
    group : query heads a KV head, where there are queries
    query_dtype : of the queries; None = there are none, or nobody knows
    """

    op: str
    k: str
    v: str
    k_dim: int
    v_dim: int
    page_tokens: int
    device: str
    features: frozenset[str] = frozenset()
    group: int = 1
    query_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", frozenset(self.features))  # any collection will do

    @property
    def all_features(self) -> list[str]:
        """The features given and those that the codecs and sizes imply; "plain" is the first."""
        implied = set(self.features)
        if self.k != self.v:
            implied.add("mixed_codecs")
        if self.k_dim != self.v_dim:
            implied.add("value_dim")
        return ["plain", *sorted(implied - {"plain"})]

    def in_words(self, feature: str) -> str:
        """A feature, with what makes the call need it where codecs or sizes do."""
        found = {
            "mixed_codecs": f" (K in {self.k}, V in {self.v})",
            "value_dim": f" (head_dim {self.k_dim} of K, {self.v_dim} of V)",
        }
        return feature + found.get(feature, "")


@dataclass(frozen=True, slots=True)
class Row:
    """One claim: this op of this backend has this feature.

    Attributes
    ----------
    op, backend, feature : what is claimed
    proof : name of the test, in this package's tests, that proves it
    codecs : codecs it holds for; None = every registered one, at each head_dim the codec allows
    head_dims : head_dims it holds for; None = any
    page_tokens : sizes of a page it holds for (tokens); None = any
    devices : torch device types it holds for; None = any whose tensors hold values
    most_group : most query heads a KV head it holds for; None = any number
    query_dtypes : codec of K or V → dtypes of the queries it holds for beside it; of others any
    """

    op: str
    backend: str
    feature: str
    proof: str
    codecs: tuple[str, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    page_tokens: tuple[int, ...] | None = None
    devices: tuple[str, ...] | None = None
    most_group: int | None = None
    query_dtypes: Mapping[str, tuple[torch.dtype, ...]] = field(default_factory=dict, hash=False)

    @property
    def id(self) -> str:
        """What the proving test's marker `proves` names."""
        return f"{self.backend}.{self.op}.{self.feature}"

    def refusal(self, need: Need) -> str | None:
        """Why the row does not cover a call; None if it does."""
        if need.device == "meta":
            return "device meta (its tensors hold no values)"
        limits = (
            ("codec", (need.k, need.v), self.codecs),
            ("head_dim", (need.k_dim, need.v_dim), self.head_dims),
            ("page_tokens", (need.page_tokens,), self.page_tokens),
            ("device", (need.device,), self.devices),
        )
        for what, asked, allowed in limits:
            for value in asked:
                if allowed is not None and value not in allowed:
                    return f"{what} {value} (has {', '.join(map(str, allowed))})"
        if self.most_group is not None and need.group > self.most_group:
            return f"{need.group} query heads a KV head (has at most {self.most_group})"
        for codec in dict.fromkeys((need.k, need.v)):
            dtypes = self.query_dtypes.get(codec)
            if dtypes is not None and need.query_dtype not in dtypes:
                given = "unknown" if need.query_dtype is None else name_of(need.query_dtype)
                return f"{codec} rows and {given} queries (has {', '.join(map(name_of, dtypes))})"
        return None


def name_of(dtype: torch.dtype) -> str:
    """A dtype in words: bfloat16."""
    return str(dtype).removeprefix("torch.")
