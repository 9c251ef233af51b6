"""Load runs against running vLLM servers, by vLLM's own generator. Runs inside a serving environment.

    python load.py REQUEST ANSWER

REQUEST  {"schedule": [{"url", "model", "tokenizer", "concurrency", "requests", "prompt_tokens", "output_tokens",
         "seed"}], "partial": FILE}
ANSWER   {"runs": [...]} in the schedule's order: either {"error"} or what was measured, with the server's counters.

PARTIAL gets a JSON line a run, so that a killed job leaves them and a reader can follow. One process runs the whole
schedule, since importing vLLM costs more than a short run.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import urllib.request
from pathlib import Path
from typing import Any

from vllm.benchmarks.serve import add_cli_args
from vllm.benchmarks.serve import main as bench
from vllm.utils.argparse_utils import FlexibleArgumentParser

COUNTERS = ("prefix_cache_hits", "request_success")
TIMES = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms")


def main(request_path: str, answer_path: str) -> None:
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    runs = []
    with Path(request["partial"]).open("w", encoding="utf-8") as partial:
        for entry in request["schedule"]:
            try:
                runs.append(measure(entry))
            except Exception as error:  # any fault of the generator or server voids this run, and is named
                runs.append({"error": f"{type(error).__name__}: {error}"})
            partial.write(json.dumps(runs[-1]) + "\n")
            partial.flush()
    Path(answer_path).write_text(json.dumps({"runs": runs}), encoding="utf-8")


def measure(entry: dict[str, Any]) -> dict[str, Any]:
    """One run of the generator, and what the server counted meanwhile."""
    before = counters(entry["url"])
    done = bench(arguments(entry))
    after = counters(entry["url"])
    return {
        "completed": done["completed"],
        "failed": done["failed"],
        "output_tokens": done["total_output_tokens"],
        "output_throughput": done["output_throughput"],
        **{name: done[name] for name in TIMES},
        "seconds": done["duration"],
        "prefix_hits": after["prefix_cache_hits"] - before["prefix_cache_hits"],
        # The counters of a server that started anew begin at zero.
        "served": after["request_success"] - before["request_success"],
    }


def arguments(entry: dict[str, Any]) -> argparse.Namespace:
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    return parser.parse_args(
        [
            *("--backend", "openai", "--base-url", entry["url"], "--endpoint", "/v1/completions"),
            *("--model", entry["model"], "--served-model-name", entry["model"], "--tokenizer", entry["tokenizer"]),
            *("--dataset-name", "random", "--random-range-ratio", "0"),
            *("--random-input-len", str(entry["prompt_tokens"]), "--random-output-len", str(entry["output_tokens"])),
            *("--num-prompts", str(entry["requests"]), "--max-concurrency", str(entry["concurrency"])),
            *("--seed", str(entry["seed"]), "--temperature", "0", "--ignore-eos", "--disable-tqdm"),
            *("--percentile-metrics", "ttft,tpot", "--metric-percentiles", "99"),
            # No probe, which costs one more request: a dead server shows in the counters and in `completed`.
            *("--ready-check-timeout-sec", "0"),
        ]
    )


def counters(url: str) -> dict[str, float]:
    """The named counters of /metrics, summed over engines and reasons; 0 where the server has none yet."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:  # noqa: S310 - an address of our own servers
        text = reply.read().decode()
    pattern = r"^vllm:%s_total(?:\{.*\})? (\S+)$"
    return {name: sum(map(float, re.findall(pattern % name, text, re.MULTILINE))) for name in COUNTERS}


if __name__ == "__main__":
    main(*sys.argv[1:])
