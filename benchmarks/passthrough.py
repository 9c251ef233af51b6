"""Speed and memory of the passthrough, against `cp` of the same checkpoint, turn by turn.

    python benchmarks/passthrough.py [--gigabytes 4] [--method fp8] [--scheme dynamic] [--repeats 3] [--json FILE]

The checkpoint is random, its shapes those of a Llama of hidden 4096 under a model_type that nobody knows, its shards
of 1 GB. quantkit fsyncs what it writes, reads it back and digests it; `cp` does none of that, so its time is given
with a `sync` after it, too. Peak memory is that of the whole process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from quality import machine
from safetensors.torch import save_file

from quantkit.checkpoint.index import read_index
from quantkit.engines import shards
from quantkit.plan import anymodel
from quantkit.records import Plan, VariantPlan

HIDDEN, INTERMEDIATE, KEYS, VOCABULARY = 4096, 14336, 1024, 32000
LAYER = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KEYS, HIDDEN),
    "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}


def make_checkpoint(folder: Path, gigabytes: float) -> None:
    """About so many gigabytes of bf16, two layers (0.9 GB) a shard."""
    folder.mkdir()
    noise = torch.randn(64 << 20).bfloat16() * 0.02
    weight_map = {}
    written, layer, shard = 0, 0, 0
    while written < gigabytes * 1e9 - 3e8:
        shapes = {
            f"model.layers.{layer + step}.{name}.weight": shape for step in (0, 1) for name, shape in LAYER.items()
        }
        if shard == 0:
            shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (VOCABULARY, HIDDEN))
        sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
        tensors, start = {}, 0
        for name, size in sizes.items():
            if size > len(noise):
                tensors[name] = noise.repeat(-(-size // len(noise)))[:size].view(shapes[name])
            else:
                start = (start + 4096) % (len(noise) - size + 1)
                tensors[name] = noise[start : start + size].view(shapes[name]).clone()
        file = f"model-{shard + 1:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        written += 2 * sum(sizes.values())
        layer, shard = layer + 2, shard + 1
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "novel"}))
    os.sync()


def quantize(folder: Path, out: Path, method: str, scheme: str) -> None:
    """What the measured process does; prints the seconds of its work, without the interpreter's start."""
    index = read_index(folder)
    modules = anymodel.linears(index.tensors)
    by_groups = method == "rtn"
    variant = VariantPlan(
        name=method,
        method=method,
        format="compressed-tensors",
        bits=4 if by_groups else 8,
        group_size=128 if by_groups else 0,
        symmetric=True,
        rounding="gptq",
        damping=0.01,
        scheme=scheme,
        modules=modules,
        ignored=anymodel.kept(index.tensors, modules),
        bytes=0,
        servable=True,
    )
    plan = Plan(
        family="novel",
        engine="shards",
        variants=(variant,),
        source_bytes=index.bytes,
        peak_bytes=0,
        disk_bytes=0,
        calibration_tokens=0,
        kv_bytes_per_token=0,
        target="cpu",
    )
    began = time.perf_counter()
    shards.quantize(index, plan, out / "artifacts", out / "ledger.jsonl", "benchmark")
    seconds = time.perf_counter() - began
    # Not the parent's wait4: Linux hands a parent's own peak on to what it starts.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    print(seconds, int(status.split("VmHWM:")[1].split()[0]) / 1024)


def timed(command: list[str]) -> tuple[float, str]:
    """Seconds and output of a process."""
    began = time.perf_counter()
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return time.perf_counter() - began, output


@click.command()
@click.option("--gigabytes", default=4.0)
@click.option("--method", type=click.Choice(["fp8", "int8", "rtn"]), default="fp8")
@click.option("--scheme", type=click.Choice(["dynamic", "block"]), default="dynamic")
@click.option("--repeats", default=3)
@click.option("--json", "output", type=click.Path(path_type=Path))
@click.option("--at-work", type=(click.Path(path_type=Path), click.Path(path_type=Path)), hidden=True)
def main(
    gigabytes: float,
    method: str,
    scheme: str,
    repeats: int,
    output: Path | None,
    at_work: tuple[Path, Path] | None,
) -> None:
    if at_work:
        quantize(*at_work, method, scheme)
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        source, out = Path(scratch) / "source", Path(scratch) / "out"
        make_checkpoint(source, gigabytes)
        size = read_index(source).bytes
        work = [sys.executable, __file__, "--method", method, "--scheme", scheme, "--at-work", str(source), str(out)]
        for _ in range(repeats):
            copied, _ = timed(["cp", "-r", str(source), str(out)])
            began = time.perf_counter()
            os.sync()
            rows.append({"engine": "cp", "method": "copy", "seconds": copied})
            rows[-1] |= {"synced_seconds": copied + time.perf_counter() - began}
            shutil.rmtree(out)
            whole, printed = timed(work)
            seconds, peak_mb = map(float, printed.split())
            rows.append({"engine": "quantkit", "method": f"{method} {scheme}", "seconds": seconds})
            rows[-1] |= {"process_seconds": whole, "peak_rss_mb": peak_mb}
            shutil.rmtree(out)
            os.sync()
    for row in rows:
        rate = size / row["seconds"] / 1e6
        print(f"{row['engine']:10}{row['seconds']:8.2f} s{rate:8.0f} MB/s  {row.get('peak_rss_mb', 0):6.0f} MB")
    middle = {name: median(row["seconds"] for row in rows if row["engine"] == name) for name in ("cp", "quantkit")}
    synced = median(row["synced_seconds"] for row in rows if row["engine"] == "cp")
    ratios = {"speed_of_cp": middle["cp"] / middle["quantkit"], "speed_of_cp_synced": synced / middle["quantkit"]}
    print("of cp's speed: {speed_of_cp:.2f}; of cp and sync: {speed_of_cp_synced:.2f}".format(**ratios))
    if output:
        record = machine() | {"model_bytes": size, **ratios, "rows": rows}
        output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
