"""run.json: which stages of a run are done, under which settings, on which machine; and one run a folder at a time."""

from __future__ import annotations

import fcntl
import hashlib
import json
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from quantkit.errors import Fault, PlanError
from quantkit.recipe import Recipe
from quantkit.records import Run, Stage

STAGES = ("plan", "quantize", "evaluate", "bench", "gate", "publish")
_TOOLS = ("quantkit", "torch", "transformers", "compressed-tensors", "lm-eval", "datasets", "safetensors", "mlflow")
_OUTPUTS = {"evaluate": "scores", "bench": "timings"}


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the folder for one run. Raises PlanError where another process holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            do = "wait for it, stop it, or give this one another --runs folder"
            raise PlanError(Fault("another quantkit run is at work here", str(folder), do)) from None
        yield


class Journal:
    """The run record of a folder, written at every change."""

    def __init__(self, folder: Path, recipe: Recipe, origin: str, quantized: str | None, source_digest: str) -> None:
        """Take up the run of this folder, or begin one.

        Raises PlanError where the folder holds artifacts of another model, calibration or set of variants.
        """
        self._path = folder / "run.json"
        self.keys = stage_keys(recipe, source_digest)
        old = Run.read(self._path) if self._path.exists() else None
        self.run = Run(
            recipe=recipe.model_dump(mode="json"),
            recipe_digest=recipe.digest,
            origin=origin,
            quantized_origin=quantized,
            source_digest=source_digest,
            calibration_digest=old.calibration_digest if old else None,
            versions=versions(),
            machine=machine(),
            stages=old.stages if old else {},
        )
        made = old.stages.get("quantize") if old else None
        if made and made.key != self.keys["quantize"]:
            what = "this folder holds the artifacts of another model, calibration or set of variants"
            do = "give the recipe another name, give another --runs folder, or delete this one"
            raise PlanError(Fault(what, str(folder), do))
        for stage, output in _OUTPUTS.items():
            known = self.run.stages.get(stage)
            if known and known.key != self.keys[stage]:
                shutil.rmtree(folder / output, ignore_errors=True)
        self.run.write(self._path)

    def due(self, stage: str) -> bool:
        """Whether the stage was never finished under the present settings."""
        known = self.run.stages.get(stage)
        return known is None or known.state != "done" or known.key != self.keys[stage]

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Run a stage: its state and seconds (over all attempts) go into run.json, whatever happens."""
        known = self.run.stages.get(name)
        spent = known.seconds if known and known.key == self.keys[name] else 0.0
        start = time.monotonic()
        self._set(name, "running", spent)
        state = "failed"
        try:
            yield
            state = "done"
        finally:
            self._set(name, state, spent + time.monotonic() - start)

    def note(self, **fields: Any) -> None:
        self.run = self.run.model_copy(update=fields)
        self.run.write(self._path)

    def _set(self, name: str, state: str, seconds: float) -> None:
        stage = Stage.model_validate({"state": state, "seconds": round(seconds, 1), "key": self.keys[name]})
        self.note(stages={**self.run.stages, name: stage})


def stage_keys(recipe: Recipe, source_digest: str) -> dict[str, str]:
    """For each stage the digest of all that its result depends on."""
    parts: dict[str, Any] = recipe.model_dump(mode="json")
    throughput = (parts["gates"] or {}).get("throughput") or {}
    load = [{k: v for k, v in regime.items() if k != "min_ratio"} for regime in throughput.get("regimes", [])]
    made = [source_digest, parts["model"], parts["calibration"], parts["variants"]]
    depends = {
        "plan": [source_digest, parts],
        "quantize": made,
        "evaluate": [made, parts["evaluate"]],
        "bench": [made, parts["serve"], throughput.get("pairs"), load],
        "gate": [source_digest, parts],
        "publish": [source_digest, parts],
    }
    return {stage: hashlib.sha256(json.dumps(on).encode()).hexdigest() for stage, on in depends.items()}


def versions() -> dict[str, str]:
    """Of Python and of the installed packages that results depend on."""
    found = {"python": platform.python_version()}
    for name in _TOOLS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str]:
    """What the numbers were measured on; no host name, no user."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8").splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    memory = psutil.virtual_memory().total / 2**30
    cores = str(psutil.cpu_count() or 1)
    return {"system": platform.system(), "cpu": cpu, "cores": cores, "memory_gib": f"{memory:.0f}"}
