"""Seconds and memory a block at the true widths of Llama-3.3-70B, on two blocks of random weights.

    python benchmarks/shape70b.py [--samples 16] [--length 512] [--methods awq,gptq,fp8] [--json FILE]

Extrapolated to 80 blocks: nothing that is kept in memory grows with their number.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path

import click
import torch
from quality import machine, variant_plan
from safetensors.torch import save_file

from quantkit.checkpoint.index import read_index
from quantkit.engines.onepass import quantize
from quantkit.records import Plan

HIDDEN, INNER, HEADS, KV_HEADS, BLOCKS, VOCABULARY = 8192, 28672, 64, 8, 2, 1024
DEPTH = 80


def make_checkpoint(folder: Path) -> None:
    head = HIDDEN // HEADS
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": BLOCKS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": head,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    random = torch.Generator().manual_seed(0)
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * head, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * head, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }

    def matrix(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=random)

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for block in range(BLOCKS):
        tensors = {f"model.layers.{block}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{block}.{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        save_file(tensors, folder / f"model-{block + 1:05d}-of-{BLOCKS + 1:05d}.safetensors")
    rest = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN), "lm_head.weight": matrix(VOCABULARY, HIDDEN)}
    rest["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    save_file(rest, folder / f"model-{BLOCKS + 1:05d}-of-{BLOCKS + 1:05d}.safetensors")
    names = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        names |= {name: path.name for name in header if name != "__metadata__"}
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


@click.command()
@click.option("--samples", default=16)
@click.option("--length", default=512)
@click.option("--group-size", default=128)
@click.option("--methods", default="awq,gptq,fp8")
@click.option("--scratch", type=click.Path(exists=True, path_type=Path), help="Where 6 GB fit; default: /tmp.")
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(samples: int, length: int, group_size: int, methods: str, scratch: Path | None, output: Path | None) -> None:
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        # In a process of its own, whose memory does not count.
        maker = multiprocessing.get_context("spawn").Process(target=make_checkpoint, args=(Path(folder) / "model",))
        maker.start()
        maker.join()
        index = read_index(Path(folder) / "model")
        plan = Plan(
            family="llama",
            variants=tuple(variant_plan(index, method, group_size) for method in methods.split(",")),
            source_bytes=index.bytes,
            peak_bytes=0,
            disk_bytes=0,
            calibration_tokens=samples * length,
            kv_bytes_per_token=0,
            target="cpu",
        )
        tokens_SL = torch.randint(VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(1))
        began = time.perf_counter()
        quantize(index, plan, tokens_SL, Path(folder) / "artifacts", Path(folder) / "ledger.jsonl", "benchmark")
        seconds = (time.perf_counter() - began) / BLOCKS
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    row = {"engine": "quantkit", "method": methods, "seconds_per_block": seconds, "peak_rss_mb": peak_mb}
    row |= {"hours_for_80_blocks": DEPTH * seconds / 3600, "samples": samples, "length": length}
    print(f"{seconds:.0f} s a block, so {DEPTH * seconds / 3600:.1f} h for {DEPTH}; peak {peak_mb / 1024:.1f} GiB")
    if output:
        output.write_text(json.dumps(machine() | {"rows": [row]}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
