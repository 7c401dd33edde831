"""States of linear-attention layers: one a running request, beside its pages, and copies of some.

What a step makes of them counts once its requests have advanced: a step that failed is computed
again, a request at a time, from the states that it began with. The copies are what the prefix
cache goes on from: snapshots, which nobody computes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kvq_cli.config import State
from kvq_cli.engine.request import Request
from kvq_cli.models.linear import Part, StaticPart
from kvq_pools import SequencePages

Work = Sequence[tuple[Request, int]]


@dataclass(slots=True)
class _Place:
    """Where a request's state is.

    Attributes
    ----------
    pages : that the request had when it began; with others it begins anew
    num_computed : tokens that the state has seen
    twins : that may go on from it; the request forgets them when they part
    """

    slot: int
    pages: SequencePages
    num_computed: int
    twins: tuple[Request, ...] = ()


@dataclass(frozen=True, slots=True)
class _Made:
    """What a step made of the states of a part, and how far its requests are when it counts.

    part : None = a graph made it, see `StatePool.static_part`
    """

    part: Part | None
    requests: tuple[Request, ...]
    ends: tuple[int, ...]


class StatePool:
    """Memory for the states of as many requests as may run at once, and for snapshots.

    Attributes
    ----------
    matrices, inputs : [layers, slots, …]: the slots of requests, then the places of snapshots
    """

    def __init__(
        self,
        state: State,
        num_requests: int,
        num_snapshots: int = 0,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`dtype`: of what is computed with, in which a convolution's inputs are kept."""
        size = len(state.layers), num_requests + num_snapshots
        self.num_requests, self.num_snapshots = num_requests, num_snapshots
        matrix = state.value_heads, state.key_dim, state.value_dim
        inputs = state.channels, state.conv_tokens
        self.matrices = torch.zeros(*size, *matrix, dtype=torch.float32, device=device)
        self.inputs = torch.zeros(*size, *inputs, dtype=dtype, device=device)
        self._index = {layer: i for i, layer in enumerate(state.layers)}
        self._places: dict[Request, _Place] = {}
        self._free = list(range(num_requests))
        self._made: list[_Made] = []
        # What graphs make, of which one runs at a time: inputs and matrices [layers, rows, …]
        self._replayed: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.matrices.nbytes + self.inputs.nbytes

    @property
    def request_bytes(self) -> int:
        """Bytes of one request's states, or of a snapshot."""
        return self.nbytes // (self.num_requests + self.num_snapshots)

    def begin(self, decodes: Work, extends: Work) -> list[Part]:
        """The states from which a step's requests go on: all decodes together, then each extend."""
        work = [request for request, _ in (*decodes, *extends)]
        self._forget(work)
        self._place(work)
        groups = [decodes] if decodes else []
        groups += [[extend] for extend in extends]
        parts, offset = [], 0
        for group in groups:
            count = sum(tokens for _, tokens in group)
            places = [self._places[request] for request, _ in group]
            fresh = places[0].num_computed == 0
            slots = self._slots(places)
            part = Part(
                slice(offset, offset + count),
                None if fresh else partial(self._copies, slots),
                together=group is decodes,
            )
            requests = tuple(request for request, _ in group)
            ends = tuple(request.num_computed + tokens for request, tokens in group)
            self._made.append(_Made(part, requests, ends))
            parts.append(part)
            offset += count
        return parts

    def reserve_replayed(self, most: int) -> None:
        """Memory for what graphs of up to `most` decodes make, as long as they are there."""
        if self._replayed is not None:
            return
        inputs, matrices = (
            buffer.new_empty(buffer.shape[0], most, *buffer.shape[2:])
            for buffer in (self.inputs, self.matrices)
        )
        self._replayed = inputs, matrices

    def static_part(self, slots: torch.Tensor) -> StaticPart:
        """The states in `slots` int64 [n] for a graph to go on from.

        What it makes of them counts for the requests of `begin_replayed`, in their order.
        """
        assert self._replayed is not None
        rows, copies = slice(0, len(slots)), partial(self._copies, slots)
        inputs, matrices = self._replayed
        return StaticPart(
            rows, copies, together=True, index=self._index, inputs=inputs, matrices=matrices
        )

    def begin_replayed(self, decodes: Sequence[Request]) -> list[int] | None:
        """The slots of the states from which decodes go on that a graph computes.

        None: what a graph has made of others does not count yet, and would be lost.
        """
        self._forget(decodes)
        if self._awaits_replayed:
            return None
        self._place(decodes)
        ends = tuple(request.num_computed + 1 for request in decodes)
        self._made.append(_Made(None, tuple(decodes), ends))
        return [self._places[request].slot for request in decodes]

    def forget_replayed(self) -> None:
        """Free the memory of graphs that are gone, where nothing in it is still to count."""
        if not self._awaits_replayed:
            self._replayed = None

    @property
    def _awaits_replayed(self) -> bool:
        return any(made.part is None for made in self._made)

    def _forget(self, work: Sequence[Request]) -> None:
        """What a failed step made of the states of requests that are computed once more."""
        self._made = [made for made in self._made if not {*work} & {*made.requests}]

    def _slots(self, places: Sequence[_Place]) -> torch.Tensor:
        return torch.tensor([place.slot for place in places], device=self.matrices.device)

    def _copies(self, slots: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        index = self._index[layer]
        return self.inputs[index, slots], self.matrices[index, slots]

    @torch.inference_mode()
    def settle(self) -> None:
        """Keep what steps made of the states of requests that have advanced, forget the rest."""
        for made in self._made:
            rows = [
                row
                for row, (request, end) in enumerate(zip(made.requests, made.ends, strict=True))
                if request in self._places and request.num_computed == end
            ]
            if rows:
                self._keep(made, rows)
        self._made = []

    @torch.inference_mode()
    def save(self, pages: SequencePages, place: int) -> bool:
        """Copy the state of a request to a snapshot's place; False when it is not there."""
        for found in self._places.values():
            if found.pages is pages and found.num_computed == pages.num_computed:
                self._copy(found.slot, self.num_requests + place)
                return True
        return False

    def _keep(self, made: _Made, rows: list[int]) -> None:
        places = [self._places[made.requests[row]] for row in rows]
        slots = self._slots(places)
        if made.part is None:
            assert self._replayed is not None
            whole = rows == [*range(len(rows))]
            for buffer, replayed in zip((self.inputs, self.matrices), self._replayed, strict=True):
                buffer[:, slots] = replayed[:, : len(rows)] if whole else replayed[:, rows]
        else:
            for layer, (inputs, matrices) in made.part.made.items():
                index = self._index[layer]
                self.inputs[index, slots] = inputs[rows]
                self.matrices[index, slots] = matrices[rows]
        for place, row in zip(places, rows, strict=True):
            place.num_computed = made.ends[row]

    def _place(self, work: Sequence[Request]) -> None:
        """Give requests that have none a slot; those that go on from what others computed, a copy.

        From a snapshot where they begin, or from the request whose twin they are.
        """
        new = []
        for request in work:
            place = self._places.get(request)
            if place is None or place.pages is not request.pages:
                new.append(request)
            elif place.num_computed != request.num_computed:
                raise RuntimeError(
                    f"request {request.request_id} goes on at token {request.num_computed} and "
                    f"its state is at {place.num_computed}"
                )
        sources = {
            request: self._source(request)
            for request in new
            if request.num_computed and _snapshot(request) is None
        }
        copies: Counter[Request | None] = Counter(sources.values())
        for request in [r for r in self._places if self._ended(r) and r not in copies]:
            self._free.append(self._places.pop(request).slot)
        for request in new:
            assert request.pages is not None
            source = sources.get(request)
            copies[source] -= 1
            if source is not None and self._ended(source) and not copies[source]:
                slot = self._places.pop(source).slot  # nobody else goes on from it
            else:
                slot, snapshot = self._free.pop(), _snapshot(request)
                if source is not None:
                    self._copy(self._places[source].slot, slot)
                elif snapshot is not None:
                    self._copy(self.num_requests + snapshot, slot)
            self._places[request] = _Place(slot, request.pages, request.num_computed)
        for request in work:
            if request.twins:
                self._places[request].twins = tuple(request.twins)

    def _copy(self, source: int, target: int) -> None:
        for buffer in (self.inputs, self.matrices):
            buffer[:, target] = buffer[:, source]

    def _source(self, request: Request) -> Request:
        """The request whose twin this one is, where both part."""
        for other, place in self._places.items():
            if request in place.twins and place.num_computed == request.num_computed:
                return other
        raise RuntimeError(
            f"request {request.request_id} goes on at token {request.num_computed} and no state "
            "is there"
        )

    def _ended(self, request: Request) -> bool:
        return request.pages is not self._places[request].pages


def _snapshot(request: Request) -> int | None:
    """The place of the state with which a request begins; None when with none or another's."""
    assert request.pages is not None
    return request.pages.snapshot
