"""What a user chose for a server."""

from __future__ import annotations

from dataclasses import dataclass

from kvq_cli.config import ConfigError, ModelGeometry
from kvq_cli.config.declared import AUTO
from kvq_cli.quoting import quoted
from kvq_cli.sizing import default_snapshots

CACHE_TYPES = ("prefix", "none")
PREFILL_READS = ("own", "packed")
ON_FAILED_CHECK = ("refuse", "fallback")
ISO = ("iso3", "iso4")
# Most decodes of a step, and tokens of a prompt's chunk, that graphs replay where nobody says
GRAPH_ROWS, GRAPH_TOKENS = 64, 1024


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What a user chose; None = decide from the model and the machine.

    Attributes
    ----------
    kv_cache_dtype : "auto" takes what the checkpoint declares, or else bf16 where max_model_len
        tokens fit in it, or else the most exact format in which they do, by what was measured of
        the model or as codecs are known
    num_tokens : size of the cache (tokens, a multiple of page_tokens)
    num_pages : the same in pages; one of them at most
    max_model_len : longest request (tokens, prompt and generated together)
    page_tokens : tokens a page
    max_prefill_tokens : most prompt tokens computed in one step
    memory_ratio : share of the free memory that weights, workspace and cache may take together
    prefill_reads : whether a prompt's chunk attends to its own keys and values as they came ("own")
        or, stored first, as later tokens will read them ("packed")
    cuda_graph_max_bs : decodes of a step up to which it is replayed from a CUDA graph; 0 = none is,
        None = as many as may run, 64 at most, where there can be graphs
    cuda_graph_max_prefill_tokens : tokens of a prompt's chunk up to which it is replayed, where
        nothing else is in its step, from a CUDA graph, max_prefill_tokens at most; 0 = none is,
        None = 1,024 at most, where measured at the start it is not slower
    compile : the model's norms, rotary embedding and feed-forward's product by torch.compile
    prefill_scratch_mb : that decoded tokens of a prompt's past may take while they are read (MiB);
        0 = none
    on_failed_check : whether a kernel that computes something else than it must keeps the server
        from starting ("refuse"), or the next backend that passes takes its place ("fallback")
    threads : that a CPU computes with
    cache_type : "prefix" keeps the pages of finished requests for those that begin alike
    state_snapshots : states of linear-attention layers that are kept with those pages; 0 = none is,
        and no page either where a model has such layers
    """

    model: str
    kv_cache_dtype: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    num_tokens: int | None = None
    num_pages: int | None = None
    max_model_len: int | None = None
    page_tokens: int = 16
    max_running_requests: int = 16
    max_prefill_tokens: int = 512
    prefill_reads: str = "own"
    prefill_scratch_mb: int = 128
    cuda_graph_max_bs: int | None = None
    cuda_graph_max_prefill_tokens: int | None = None
    compile: bool = False
    memory_ratio: float | None = None
    attention_backend: str = "auto"
    on_failed_check: str = "refuse"
    cache_type: str = "prefix"
    state_snapshots: int | None = None
    served_model_name: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("page_tokens", "max_running_requests", "max_prefill_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.cuda_graph_max_bs is not None and self.cuda_graph_max_bs < 0:
            raise ConfigError(
                f"cuda_graph_max_bs must be at least 0, got {self.cuda_graph_max_bs}; with 0 "
                "nothing is replayed"
            )
        if (self.cuda_graph_max_prefill_tokens or 0) < 0:
            raise ConfigError(
                "cuda_graph_max_prefill_tokens must be at least 0, got "
                f"{self.cuda_graph_max_prefill_tokens}; with 0 no prompt is replayed"
            )
        if self.cuda_graph_max_prefill_tokens and self.prefill_reads == "packed":
            raise ConfigError(
                f"cuda_graph_max_prefill_tokens {self.cuda_graph_max_prefill_tokens} asks for "
                "CUDA graphs of prompts, which read their own rows; use prefill_reads own, or 0"
            )
        if self.state_snapshots is not None and self.state_snapshots < 0:
            raise ConfigError(
                f"state_snapshots must be at least 0, got {self.state_snapshots}; with 0 requests "
                "that begin alike are computed whole where a model has linear-attention layers"
            )
        if self.prefill_scratch_mb < 0:
            raise ConfigError(
                f"prefill_scratch_mb must be at least 0, got {self.prefill_scratch_mb}; with 0 "
                "each tile of a prompt's chunk decodes the tokens before it for itself"
            )
        words = {
            "cache_type": CACHE_TYPES,
            "prefill_reads": PREFILL_READS,
            "on_failed_check": ON_FAILED_CHECK,
        }
        for name, allowed in words.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name} must be {' or '.join(allowed)}, got {getattr(self, name)!r}"
                )
        if self.served_model_name == "":
            raise ConfigError("served_model_name is empty; give a name or leave it out")
        if self.memory_ratio is not None and not 0 < self.memory_ratio <= 1:
            raise ConfigError(
                f"memory_ratio must be above 0 and at most 1, got {self.memory_ratio}"
            )
        for name in ("num_tokens", "num_pages", "max_model_len", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.num_tokens is not None and self.num_tokens % self.page_tokens:
            pages = self.num_tokens // self.page_tokens
            near = [str(n * self.page_tokens) for n in (pages, pages + 1) if n]
            raise ConfigError(
                f"num_tokens must be a multiple of page_tokens ({self.page_tokens}), got "
                f"{self.num_tokens}; take {' or '.join(near)}"
            )
        if self.num_tokens is not None and self.num_pages is not None:
            raise ConfigError(
                f"num_tokens {self.num_tokens} and num_pages {self.num_pages} both size the "
                "cache; give one of them"
            )

    @property
    def scratch_bytes(self) -> int:
        """Of `prefill_scratch_mb`."""
        return self.prefill_scratch_mb << 20

    def graph_rows(self, *, on_host: bool) -> int:
        """Most decodes of a step that graphs replay."""
        most = self.cuda_graph_max_bs
        if most is None:
            most = 0 if on_host else GRAPH_ROWS
        return min(most, self.max_running_requests)

    def graph_tokens(self, shape: ModelGeometry, *, on_host: bool) -> int:
        """Most tokens of a prompt's chunk that graphs replay."""
        most = self.cuda_graph_max_prefill_tokens
        if most is None:
            without = on_host or shape.state is not None or self.prefill_reads == "packed"
            most = 0 if without else GRAPH_TOKENS
        return min(most, self.max_prefill_tokens)

    @property
    def snapshots(self) -> int:
        """Of states, where a model has any."""
        if self.cache_type == "none":
            return 0
        if self.state_snapshots is not None:
            return self.state_snapshots
        return default_snapshots(self.max_running_requests)

    @property
    def size_tokens(self) -> int | None:
        """Tokens of a cache whose size was named, by either name."""
        if self.num_pages is not None:
            return self.num_pages * self.page_tokens
        return self.num_tokens


def cache_format(kv_cache_dtype: str, kv_cache_iso: str | None) -> str:
    """The format that either option names; `ConfigError` where they disagree.

    Parameters
    ----------
    kv_cache_iso : one of the rotated codecs, another way to give it as kv_cache_dtype
    """
    if kv_cache_iso is None:
        return kv_cache_dtype
    if kv_cache_iso not in ISO:
        raise ConfigError(
            f"kv_cache_iso must be {' or '.join(ISO)}, got {quoted(kv_cache_iso)}; kv_cache_dtype "
            "takes every format"
        )
    if kv_cache_dtype not in (AUTO, kv_cache_iso):
        raise ConfigError(
            f"kv_cache_dtype {quoted(kv_cache_dtype)} and kv_cache_iso {kv_cache_iso} name two "
            "formats; give one of them"
        )
    return kv_cache_iso
