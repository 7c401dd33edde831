"""Tokens per second of the engine beside transformers' own generate, same model, same prompts.

python bench_engine.py MODEL --cache q8_0 k=q8_0,v=q4_0 --batch 1 8 --json OUT
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from importlib.metadata import version
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvq_cli.compose import ServeOptions, build_engine
from kvq_cli.engine.params import SamplingParams


def prompts(vocabulary: int, batch: int, length: int) -> list[list[int]]:
    """Random tokens: the time of a step does not depend on which they are."""
    rng = torch.Generator().manual_seed(batch)
    return torch.randint(5, vocabulary - 5, (batch, length), generator=rng).tolist()


def time_transformers(model: Any, batch: list[list[int]], new: int) -> float:
    """Seconds of one greedy batch with transformers' cache."""
    model.set_attn_implementation("sdpa")
    ids = torch.tensor(batch, device=model.device)
    start = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
    )
    return time.perf_counter() - start


def time_kvq(engine: Any, batch: list[list[int]], new: int) -> float:
    """Seconds of one greedy batch through the engine."""
    engine.runner.model.set_attn_implementation("kvq")
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    for i, prompt in enumerate(batch):
        engine.add(str(i), prompt, params)
    while engine.has_work:
        engine.step()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--cache", nargs="+", default=["fp32", "q8_0", "q4_0", "k=q8_0,v=q4_0"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = []
    for cache in args.cache:
        options = ServeOptions(args.model, kv_cache_dtype=cache)
        engine = build_engine(options)._engine
        model = engine.runner.model
        for size in args.batch:
            batch = prompts(engine.runner.geometry.vocab_size, size, args.prompt)
            ours, theirs = [], []
            for _ in range(args.repeat):  # in turns: both see the same machine
                ours.append(time_kvq(engine, batch, args.new))
                theirs.append(time_transformers(model, batch, args.new))
            tokens = size * args.new
            rows.append(
                {
                    "cache": options.kv_cache_dtype,
                    "batch": size,
                    "kvq_tokens_per_s": round(tokens / statistics.median(ours), 1),
                    "transformers_tokens_per_s": round(tokens / statistics.median(theirs), 1),
                }
            )
    table = Table("cache", "batch", "kvq tok/s", "transformers tok/s", title=args.model)
    for row in rows:
        table.add_row(*(str(v) for v in row.values()))
    Console().print(table)
    if args.json:
        packages = ("torch", "transformers", "kvq-codecs", "kvq-pools", "kvq-attention", "kvq-cli")
        machine = platform.processor() or platform.machine()
        record = {
            "title": f"Engine on {engine.runner.device}, {options.model}",
            "what": "generated tokens a second, prefill included, median; transformers' own "
            "generate in turns with the engine, on the same model and prompts",
            "plot": {
                "label": "{cache}, batch {batch}",
                "values": ["kvq_tokens_per_s", "transformers_tokens_per_s"],
            },
            "hardware": f"{machine}, {torch.get_num_threads()} threads",
            "versions": {name: version(name) for name in packages},
            "command": f"bench_engine.py {args.model} --prompt {args.prompt} --new {args.new} "
            f"--repeat {args.repeat}",
            "rows": rows,
        }
        with open(args.json, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
