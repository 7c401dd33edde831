"""What computing a step takes beside weights and cache, at most.

The terms follow `kvq serve`: a transformers model that keeps one layer's activations at a time,
over the reference attention or, on a GPU, over kernels. Tests hold them against the bytes that
really live during steps, and against what kernels ask for.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvq_cli.config.geometry import ModelGeometry, State
from kvq_codecs.codec import DEVICE_CHUNK_VALUES, HOST_CHUNK_VALUES
from kvq_pools import heads_per_rank

# As kvq_attention has them; it imports torch, so tests compare instead. What kernels have:
KERNEL_HEAD_DIMS, KERNEL_PAGE_TOKENS = (64, 80, 96, 112, 128, 192, 256), (16, 32, 64, 128)
# and the reference.
SCORE_BYTES, BLOCK_ROWS = 64 << 20, 64
# Kernels that decode cut requests into chunks, of an eighth of the largest at least, and have up
# to so many query rows in a piece of work.
CHUNK, MOST_CHUNKS, PIECE_ROWS = 1024, 256, 16
# Pieces by which the largest GPU is full: 8 a multiprocessor
MOST_AT_ONCE = 8 * 304
# Reads of packed prompts are cut into chunks of one size.
PACKED_CHUNK = 4096
# Triton's extend cuts the past of requests of few row tiles into as many parts of a chunk at most.
MOST_PARTS, TILE_ROWS = 16, 128
# Codecs code a chunk of values at a time, through integers and floats of several widths.
CODEC_BYTES_PER_VALUE = 36
# Tokens that linear attention computes at once.
LINEAR_CHUNK = 64
FP32 = 4
# So many values of distributions are drawn from at a time, but of one whole row at least.
DRAWN_VALUES = 1 << 21


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes by what needs them; of attention, feed_forward and logits one lives at a time.

    Attributes
    ----------
    hidden : the residual stream of a step's tokens, its normalization, rotary tables
    attention : queries, keys, values and their rotated copies. Of the reference: K and V of one
        request and layer decoded to float32, a block of scores, a codec's chunk. Of kernels: the
        scratch that a past is decoded into, partial results
    feed_forward : one layer's, of all experts that a token visits
    logits : of one token a request, and the distributions that are drawn from at a time
    states : what a step makes of its requests' states, until it counts
    graphs : what steps that are replayed keep for themselves
    """

    hidden: int
    attention: int
    feed_forward: int
    logits: int
    states: int = 0
    graphs: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes at the peak."""
        largest = max(self.attention, self.feed_forward, self.logits)
        return self.hidden + self.states + self.graphs + largest


def usual_requests(max_running_requests: int) -> int:
    """Requests that an engine usually runs of those that may run: see `Batch.usual_requests`.

    An eighth: of 16 on an H200, neither a lone request nor as many as may run are decoded slower
    than they could be by more than a few hundredths of a step, by what decodes alone take there.
    """
    return -(-max_running_requests // 8)


def kernels_serve(model: ModelGeometry, page_tokens: int) -> bool:
    """Whether a GPU computes attention by kernels, where nothing else is asked for."""
    return model.head_dim in KERNEL_HEAD_DIMS and page_tokens in KERNEL_PAGE_TOKENS


def workspace(
    model: ModelGeometry,
    *,
    context: int,
    max_running_requests: int,
    max_prefill_tokens: int,
    value_bytes: int = 2,
    on_host: bool = False,
    by_reference: bool = True,
    packed_prefill: bool = False,
    scratch_bytes: int = 0,
    graph_rows: int = 0,
    graph_tokens: int = 0,
    ranks: int = 1,
) -> Workspace:
    """An upper estimate of a step's peak on one rank.

    Parameters
    ----------
    context : most tokens of a request
    max_running_requests, max_prefill_tokens : a step computes at most one token of each running
        request and so many of prompts
    value_bytes : of what is computed with
    on_host : a CPU codes smaller chunks than a GPU
    by_reference : whether the reference may compute some operation of a GPU's, as all of a CPU's;
        it decodes a request's whole context to float32, which kernels never do
    packed_prefill : whether prompts are read as decodes are, in parts that a GPU merges
    scratch_bytes : into which a GPU may decode the past of prompts that are not
    graph_rows, graph_tokens : decodes, and tokens of a prompt, of the largest steps that are
        replayed, in memory that all graphs share
    ranks : tensor-parallel; heads and feed-forward parts are divided
    """
    tokens = max_running_requests + max_prefill_tokens
    hidden = tokens * (model.hidden_size * (4 * value_bytes + 3 * FP32) + 4 * model.head_dim * FP32)

    if model.window is not None and not model.full_layers:
        context = min(context, model.window - 1 + max_prefill_tokens)
    width, rows = _widest_layer(model, ranks)
    projected = tokens * width * (4 * value_bytes + 2 * FP32)
    attention = 0
    if by_reference or on_host:
        seen = context * rows
        decoded = 3 * seen * FP32  # keys, values and the packed rows of the latter
        chunk = min(HOST_CHUNK_VALUES if on_host else DEVICE_CHUNK_VALUES, max(seen, tokens * rows))
        scores = _score_bytes(-(-model.num_heads // ranks), context)
        attention = decoded + chunk * CODEC_BYTES_PER_VALUE + scores
    if not on_host:
        running, prompt = max_running_requests, max_prefill_tokens
        extend = (
            _partial_bytes(model, ranks, running, prompt, _fixed_chunks(context))
            if packed_prefill
            else scratch_bytes + _part_bytes(model, ranks, running, prompt, context)
        )
        decode = _partial_bytes(
            model, ranks, running, running, _chunks(model, ranks, running, context)
        )
        attention = max(attention, extend, decode)
    attention += projected

    experts = model.experts_per_token
    copies = 10 if experts else 5  # some experts clamp and gate in copies of their own
    feed_forward = tokens * (copies * model.feed_forward // ranks + 3 * experts * model.hidden_size)
    values = max_running_requests * model.vocab_size
    # scores, those in order, their order, and sums in float64
    drawing = 48 * min(values, max(DRAWN_VALUES, model.vocab_size))
    logits = values * (value_bytes + 2 * FP32) + drawing
    states = 0
    if model.state is not None:
        states = max_running_requests * model.state.request_bytes(ranks, value_bytes)
        linear = _linear_bytes(model.state, max_running_requests, max_prefill_tokens)
        attention = max(attention, linear // ranks)
    graphs = 0
    prompts = min(1, graph_tokens)
    for rows, tokens, scratch in ((graph_rows, 0, 0), (prompts, graph_tokens, scratch_bytes)):
        if rows:
            replayed = workspace(
                model,
                context=context,
                max_running_requests=rows,
                max_prefill_tokens=tokens,
                value_bytes=value_bytes,
                by_reference=by_reference,
                scratch_bytes=scratch,
                ranks=ranks,
            )
            graphs = max(graphs, replayed.nbytes)
    return Workspace(hidden, attention, feed_forward * value_bytes, logits, states, graphs)


def _linear_bytes(state: State, running: int, prompt: int) -> int:
    """Of a linear-attention layer, which computes decodes together and then prompts one by one.

    Prompts are cut into chunks of 64 tokens: by value head in float32 and several copies. Decodes
    take a copy of their matrices and two more.
    """
    rows = state.value_heads * (5 * state.key_dim + 5 * state.value_dim + 4 * LINEAR_CHUNK)
    chunks = (prompt + LINEAR_CHUNK) * (rows + 4 * state.channels)
    decodes = 3 * running * state.value_heads * state.key_dim * state.value_dim
    return FP32 * max(chunks, decodes)


def _widest_layer(model: ModelGeometry, ranks: int) -> tuple[int, int]:
    """Values of a token's queries, keys and values; and of its keys alone."""
    heads = -(-model.num_heads // ranks)
    local = _shapes(model, ranks)
    width = max((heads + 2 * kv_heads) * dim for kv_heads, dim in local)
    if model.state is not None:
        state = model.state
        channels = 2 * state.key_heads * state.key_dim + state.value_heads * state.value_dim
        width = max(width, channels // ranks)
    return width, max(kv_heads * dim for kv_heads, dim in local)


def _shapes(model: ModelGeometry, ranks: int) -> list[tuple[int, int]]:
    """KV heads of a rank and head_dim of each kind of layer."""
    shapes = [(model.num_kv_heads, model.head_dim)]
    if model.window_layers:
        shapes.append(
            (
                model.window_kv_heads or model.num_kv_heads,
                model.window_head_dim or model.head_dim,
            )
        )
    return [(heads_per_rank(kv_heads, ranks), dim) for kv_heads, dim in shapes]


def _chunks(model: ModelGeometry, ranks: int, requests: int, context: int) -> int:
    """Partial results of a decode's query that are merged, on any GPU, at most."""
    fewest = min(kv_heads for kv_heads, _ in _shapes(model, ranks))
    wanted = max(1, MOST_AT_ONCE // (usual_requests(requests) * fewest))
    return min(MOST_CHUNKS, max(1, min(wanted, 8 * context // CHUNK), -(-context // CHUNK)))


def _fixed_chunks(context: int) -> int:
    """Partial results of a packed prompt's query, of which one is merged like several."""
    return min(MOST_CHUNKS, -(-context // PACKED_CHUNK))


def _partial_bytes(
    model: ModelGeometry, ranks: int, requests: int, tokens: int, chunks: int
) -> int:
    """Of what a decode's chunks come to: a row and a weight of each query, head and chunk."""
    heads = -(-model.num_heads // ranks)
    return max(
        chunks * (requests * PIECE_ROWS * kv_heads + tokens * heads) * (dim + 1) * FP32
        for kv_heads, dim in _shapes(model, ranks)
    )


def _part_bytes(model: ModelGeometry, ranks: int, requests: int, tokens: int, context: int) -> int:
    """Of what the parts of pasts come to that an extend has cut."""
    if context <= CHUNK:
        return 0
    parts, heads = min(MOST_PARTS, -(-context // CHUNK)), -(-model.num_heads // ranks)
    return max(
        min(min(requests, tokens) * TILE_ROWS * MOST_PARTS * kv_heads, tokens * heads * parts)
        * (dim + 1)
        * FP32
        for kv_heads, dim in _shapes(model, ranks)
    )


def _score_bytes(heads: int, context: int) -> int:
    """A block of query rows over all they see, of the cache and of the step, and the two joined.

    Of a request of `context` tokens or fewer: one whose rows just fill a block takes more than one
    that is longer, of whose rows fewer fit.
    """
    row = 2 * heads * context * FP32
    return max(row, min(BLOCK_ROWS * row, SCORE_BYTES))
