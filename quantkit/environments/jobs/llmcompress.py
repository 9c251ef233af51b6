"""One artifact by llmcompressor, from the token ids that quantkit's own engine saw. Runs inside its environment.

    python llmcompress.py REQUEST ANSWER

REQUEST  {"model": FOLDER, "tokens": FILE.safetensors with int64 "tokens" [S, L], "method": "awq" | "gptq" | "fp8",
         "group_size": int, "symmetric": bool, "out": FOLDER}
ANSWER   {"seconds": of the tool's own work, loading and saving included, "peak_rss_mb": float, "versions": {...}}
"""

from __future__ import annotations

import json
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.awq import AWQModifier
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(request_path: str, answer_path: str) -> None:
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    if not torch.cuda.is_available():
        # It pins every tensor in memory, which a build without CUDA refuses; no option turns that off.
        IntermediatesCache.pin_memory = lambda *_, **__: None
    tokens_SL = load_file(request["tokens"])["tokens"]
    samples = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in tokens_SL]
    began = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(request["model"])
    calibrated = request["method"] != "fp8"
    data: dict[str, Any] = {}
    if calibrated:
        data = {"dataset": Dataset.from_list(samples), "num_calibration_samples": len(samples)}
        data |= {"max_seq_length": tokens_SL.shape[1], "shuffle_calibration_samples": False}
    oneshot(model=model, processor=tokenizer, recipe=[*modifiers(request)], **data)
    model.save_pretrained(request["out"], save_compressed=True)
    tokenizer.save_pretrained(request["out"])
    answer = {
        "seconds": time.perf_counter() - began,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "versions": {name: version(name) for name in ("llmcompressor", "compressed-tensors", "torch", "transformers")},
    }
    Path(answer_path).write_text(json.dumps(answer), encoding="utf-8")


def modifiers(request: dict[str, Any]) -> list[Any]:
    if request["method"] == "fp8":
        return [QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head"])]
    weights = QuantizationArgs(
        num_bits=4, type="int", strategy="group", group_size=request["group_size"], symmetric=request["symmetric"]
    )
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
    if request["method"] == "gptq":
        return [GPTQModifier(config_groups=groups, ignore=["lm_head"])]
    return [AWQModifier(config_groups=groups, ignore=["lm_head"])]


if __name__ == "__main__":
    main(*sys.argv[1:])
