"""All that a kernel knows about the requests of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvq_attention.errors import BatchError, DeviceError, SlotError, TensorError


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Where one tier keeps the tokens of a step's requests. The scheduler fills it.

    Attributes
    ----------
    page_table : int32 [R, max_pages], page id of positions [i · page_tokens, (i+1) · page_tokens);
        −1 = no page (not allocated yet, or left behind by a window)
    slot_mapping : int64 [T], slot (page · page_tokens + offset) that takes each of the step's
        tokens; −1 = padding, not stored
    """

    page_table: torch.Tensor
    slot_mapping: torch.Tensor

    def __post_init__(self) -> None:
        _expect("page_table", self.page_table, torch.int32, 2)
        _expect("slot_mapping", self.slot_mapping, torch.int64, 1)


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a batch, read on the host.

    Attributes
    ----------
    index : its row of the page tables
    start, stop : its query tokens are rows [start, stop) of the step's T
    length : tokens in the cache after this step; its queries are the last of them
    """

    index: int
    start: int
    stop: int
    length: int

    @property
    def queries(self) -> int:
        """Its query tokens."""
        return self.stop - self.start

    @property
    def first_position(self) -> int:
        """Position of its first query token; the positions before it are its past."""
        return self.length - self.queries


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The requests of one call. The scheduler fills it, once a step, for all layers.

    Attributes
    ----------
    query_offsets : int32 [R+1], request r owns query rows [query_offsets[r], query_offsets[r+1]);
        rows from query_offsets[R] on are padding
    seq_lens : int32 [R], tokens in the cache after this step, this step's included;
        0 = a padded request, whose rows give 0
    tables : tier name → `Table`
    page_tokens : tokens a page
    any_cut : whether a decode must give queries the bits that they get wherever their requests are
        cut into steps: prompts that are read packed
    usual_requests : requests that calls of this kind usually have, the same in each of them: the
        fewer, the more pieces decodes cut each into, so that they fill the device. It decides last
        bits, which R does not. None = nobody knows
    host : what `requests` reads, where whoever fills the batch knows it on the host, each step
        anew: kernels may be chosen by it. None = it is not known, or changes as a graph replays

    Raises `TensorError`, `DeviceError` or `BatchError`. Values are checked here where reading
    them costs no synchronization, that is on a CPU; `requests` checks them anywhere.
    """

    query_offsets: torch.Tensor
    seq_lens: torch.Tensor
    tables: Mapping[str, Table]
    page_tokens: int
    host: tuple[Request, ...] | None = None
    any_cut: bool = False
    usual_requests: int | None = None

    def __post_init__(self) -> None:
        _expect("query_offsets", self.query_offsets, torch.int32, 1)
        _expect("seq_lens", self.seq_lens, torch.int32, 1)
        if type(self.page_tokens) is not int or self.page_tokens < 1:
            raise BatchError(f"page_tokens must be an int of at least 1, got {self.page_tokens!r}")
        if not isinstance(self.tables, Mapping):
            raise BatchError(
                f"tables must map tier names to Tables, got {type(self.tables).__name__}"
            )
        if not self.tables:
            raise BatchError("tables is empty; a batch needs the Table of at least one tier")
        count, usual = self.num_requests, self.usual_requests
        if usual is not None and (type(usual) is not int or usual < 1):
            raise BatchError(f"usual_requests must be None or an int of at least 1, got {usual!r}")
        if self.query_offsets.shape[0] != count + 1:
            raise BatchError(
                f"{count} seq_lens need {count + 1} query_offsets, got "
                f"{self.query_offsets.shape[0]}"
            )
        for tier, table in self.tables.items():
            if not isinstance(table, Table):
                raise BatchError(f"tables[{tier!r}] must be a Table, got {type(table).__name__}")
            if table.page_table.shape[0] != count:
                raise BatchError(
                    f"page_table of tier {tier!r} has {table.page_table.shape[0]} rows for "
                    f"{count} requests"
                )
            if table.slot_mapping.shape[0] != self.num_tokens:
                raise BatchError(
                    f"slot_mapping of tier {tier!r} has {table.slot_mapping.shape[0]} tokens, "
                    f"another tier's has {self.num_tokens}"
                )
        devices = {tensor.device for tensor in self.tensors().values()}
        if len(devices) > 1:
            homes = ", ".join(f"{n} on {t.device}" for n, t in self.tensors().items())
            raise DeviceError(f"the tensors of a batch must lie on one device, got {homes}")
        if self.seq_lens.device.type == "cpu":
            read = tuple(self.requests())
            if self.host is not None and self.host != read:
                raise BatchError(f"host must be what the tensors hold, got {self.host} for {read}")
        elif self.host is not None and [r.index for r in self.host] != list(range(count)):
            raise BatchError(f"host must be of {count} requests in their order, got {self.host}")

    @property
    def num_requests(self) -> int:
        """R."""
        return int(self.seq_lens.shape[0])

    @property
    def num_tokens(self) -> int:
        """T: query tokens, padding included."""
        return int(next(iter(self.tables.values())).slot_mapping.shape[0])

    def table(self, tier: str) -> Table:
        """The table of a tier; `BatchError` names the tiers there are."""
        if tier not in list(self.tables):  # by equality: what cannot be hashed is no tier either
            raise BatchError(f"the batch has no tier {tier!r}; it has {list(self.tables)}")
        return self.tables[tier]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by name."""
        named = {"query_offsets": self.query_offsets, "seq_lens": self.seq_lens}
        for tier, table in self.tables.items():
            named[f"page_table of tier {tier!r}"] = table.page_table
            named[f"slot_mapping of tier {tier!r}"] = table.slot_mapping
        return named

    def requests(self) -> list[Request]:
        """The requests, read on the host and checked; on a device this synchronizes."""
        offsets, lengths = self.query_offsets.tolist(), self.seq_lens.tolist()
        if offsets[0] != 0 or offsets[-1] > self.num_tokens:
            raise BatchError(
                f"query_offsets must start at 0 and end within the {self.num_tokens} tokens of "
                f"slot_mapping, got {offsets[0]} … {offsets[-1]}"
            )
        found = []
        for index, length in enumerate(lengths):
            start, stop = offsets[index], offsets[index + 1]
            if stop < start:
                raise BatchError(f"query_offsets must not decrease: {stop} follows {start}")
            if length != 0 and length < stop - start:
                raise BatchError(
                    f"request {index} has {stop - start} query tokens and seq_len {length}; "
                    "seq_lens count this step's tokens too (0 = a padded request)"
                )
            found.append(Request(index, start, stop, length))
        return found

    def pages(
        self, tier: str, request: Request, start: int, stop: int, num_pages: int
    ) -> torch.Tensor:
        """Pages int64 [n] that hold positions [start, stop) of a request; synchronizes.

        Raises `SlotError` when the table ends before them or names a page outside
        [0, num_pages), −1 included.
        """
        table = self.table(tier).page_table
        first, last = start // self.page_tokens, -(-stop // self.page_tokens)
        where = f"tier {tier!r}, request {request.index}, positions [{start}, {stop})"
        if last > table.shape[1]:
            raise SlotError(
                f"{where}: {last} pages of {self.page_tokens} tokens are needed, the page table "
                f"has {table.shape[1]} columns"
            )
        pages = table[request.index, first:last].long()
        if pages.numel():
            low, high = (int(edge) for edge in torch.aminmax(pages))
            if low < 0 or high >= num_pages:
                raise SlotError(
                    f"{where}: pages {pages.tolist()} must lie in [0, {num_pages}); −1 marks a "
                    "page that was never allocated or is released already"
                )
        return pages


def _expect(name: str, tensor: object, dtype: torch.dtype, ndim: int) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TensorError(f"{name} must be a torch tensor, got {type(tensor).__name__}")
    if tensor.dtype != dtype or tensor.ndim != ndim:
        raise TensorError(
            f"{name} must be a {ndim}-d {dtype} tensor, got {tensor.dtype} of shape "
            f"{list(tensor.shape)}"
        )
