"""Make the tool environments from their locks: once, whole or not at all.

A lock names every package with its version; pip resolves nothing but torch's own needs. The build of torch is the one
that the machine's pip takes (a CPU wheel, or the CUDA build with its libraries): a lock says `torch==V` where both do,
and `torch===V` where it must be the CUDA build.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from quantkit.errors import Fault, ToolError
from quantkit.paths import cache_folder
from quantkit.records import write_json

LOCKS = Path(__file__).with_name("locks")
READY = "ready.json"


@dataclass(frozen=True)
class Facts:
    minutes: int
    """About, on two cores with a near package index."""
    gigabytes: float
    imports: tuple[str, ...] = ()
    """What must import before the environment counts as built."""
    driver: bool = False
    """Needs an NVIDIA driver."""


SERVER = ("torch", "vllm.entrypoints.openai.api_server", "vllm.benchmarks.serve")
FACTS = {
    "serve-cpu": Facts(3, 2.2, SERVER),
    "serve-cuda": Facts(12, 12.0, SERVER, driver=True),
}
OTHER = Facts(1, 0.1)

CHECK = """
import importlib, importlib.metadata, json, sys
pins, modules = json.loads(sys.argv[1]), json.loads(sys.argv[2])
for name, pin in pins.items():
    found = importlib.metadata.version(name)
    assert found.split("+")[0] == pin, f"{name} is {found}, not {pin}"
for module in modules:
    importlib.import_module(module)
"""


def names() -> list[str]:
    return sorted(path.stem for path in LOCKS.glob("*.txt"))


def digest(name: str) -> str:
    """sha256 over the pins, the Python version and the machine: what decides whether an environment can be used."""
    identity = [sorted(pins(name).items()), platform.python_version_tuple()[:2], platform.machine(), sys.platform]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def pins(name: str) -> dict[str, str]:
    """Package -> version as the lock says it. Raises ToolError for an unknown name or a line that is no full pin."""
    lock = LOCKS / f"{name}.txt"
    if name not in names():
        raise ToolError(Fault(f"unknown environment {name!r}", str(LOCKS), f"use one of {', '.join(names())}"))
    found = {}
    for number, line in enumerate(lock.read_text(encoding="utf-8").splitlines(), 1):
        text = line.split("#")[0].strip()
        pin = re.fullmatch(r"([A-Za-z0-9._-]+)===?([A-Za-z0-9.!]+)", text)
        if pin:
            found[pin[1]] = pin[2]
        elif text:
            raise ToolError(Fault(f"not a full pin: {text}", f"{lock}:{number}", "write NAME==VERSION"))
    return found


def folder(name: str) -> Path:
    return cache_folder() / "environments" / f"{name}-{digest(name)[:16]}"


def sync(name: str) -> Path:
    """The interpreter of environment NAME, which is built first where it is not yet there.

    Raises ToolError with the log's tail; what a failed or killed build left is wiped by the next one.
    """
    place = folder(name)
    python = place / "bin" / "python"
    if (place / READY).exists():
        return python
    place.parent.mkdir(parents=True, exist_ok=True)
    with _builder(place) as lock_file:
        if not (place / READY).exists():
            if place.exists():
                shutil.rmtree(place)
            _build(name, place, lock_file)
    return python


def doctor() -> list[dict[str, str]]:
    """One row an environment: is it built, what it takes to build it, and what the machine lacks for it."""
    rows = []
    for name in names():
        facts, place = FACTS.get(name, OTHER), folder(name)
        if (place / READY).exists():
            state = f"built, {json.loads((place / READY).read_text(encoding='utf-8'))['seconds']:.0f} s"
        else:
            state = "a build was cut short" if place.exists() else "not built"
        lacks = [] if not facts.driver or has_driver() else ["no NVIDIA driver"]
        free = shutil.disk_usage(_existing(place)).free / 1e9
        if not state.startswith("built") and free < 1.5 * facts.gigabytes:
            lacks.append(f"{free:.1f} GB free where the build takes {1.5 * facts.gigabytes:.1f}")
        cost = f"about {facts.minutes} min, {facts.gigabytes:.1f} GB"
        rows.append(
            {
                "name": name,
                "state": state,
                "lock": digest(name)[:16],
                "build": cost,
                "machine": "; ".join(lacks) or "has what it wants",
                "folder": str(place),
            }
        )
    return rows


def has_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _build(name: str, place: Path, lock_file: int) -> None:
    started, wanted, facts = time.monotonic(), pins(name), FACTS.get(name, OTHER)
    lock, log, python = LOCKS / f"{name}.txt", place.with_suffix(".log"), str(place / "bin" / "python")
    if facts.driver and not has_driver():
        what = f"environment {name} serves on NVIDIA GPUs, and this machine has no driver for them"
        raise ToolError(Fault(what, str(lock), "build it on the GPU machine, or serve on target cpu"))
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--no-input", "--progress-bar", "off"]
    torch = [line for line in lock.read_text(encoding="utf-8").splitlines() if re.match(r"torch===?\S", line)]
    steps = {"venv": [sys.executable, "-m", "venv", str(place)]}
    if torch:
        # With its own needs: they differ between the CPU and the CUDA build, so no lock can name them for both.
        steps["torch"] = [*pip, *torch]
    steps["packages"] = [*pip, "--no-deps", "-r", str(lock)]
    steps["self check"] = [python, "-c", CHECK, json.dumps(wanted), json.dumps(facts.imports)]
    title = f"environment {name} (about {facts.minutes} min, {facts.gigabytes:.1f} GB)"
    log.unlink(missing_ok=True)
    # No time left from the pace: the steps are too unlike; the title says about how long it takes.
    shape = "{desc}: {n_fmt}/{total_fmt}, {elapsed}{postfix}"
    with tqdm(total=len(wanted) + len(steps), desc=title, file=sys.stderr, bar_format=shape) as bar:
        for step, command in steps.items():
            bar.set_postfix_str(step)
            code = _run(command, log, lock_file, bar if step == "packages" else None)
            if code:
                what = f"environment {name}: step {step!r} ended with exit code {code}; its log ends:\n{tail(log)}"
                do = f"see the log, then: quantkit env sync {name}; what is half built is wiped by that"
                raise ToolError(Fault(what, str(log), do))
            bar.update()
    write_json(place / READY, {"digest": digest(name), "pins": wanted, "seconds": time.monotonic() - started})


def _run(command: list[str], log: Path, lock_file: int, bar: tqdm[NoReturn] | None) -> int:
    """Run one step of a build, its output appended to the log, one tick of the bar for each package that pip takes."""
    clean = {key: value for key, value in os.environ.items() if not re.match(r"PYTHON|VIRTUAL_ENV|__PYVENV", key)}
    with (
        log.open("a", encoding="utf-8") as out,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=clean,
            pass_fds=(lock_file,),
        ) as process,
    ):
        try:
            for line in process.stdout or ():
                out.write(line)
                if bar is not None and line.startswith(("Collecting ", "Processing ", "Requirement already")):
                    bar.update()
                if bar is not None and line.startswith("Installing collected"):
                    bar.set_postfix_str("unpacking")
        except BaseException:
            process.kill()
            raise
    return process.returncode


@contextmanager
def _builder(place: Path) -> Iterator[int]:
    """Be the only builder of `place`; the others wait. The lock is pip's too, so that an orphaned pip holds it."""
    with place.with_suffix(".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tqdm.write(f"another process builds {place}; waiting for it", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def tail(log: Path, lines: int = 20) -> str:
    """The last lines of a log, each indented and cut to 300 characters."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 65536))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"    (no log: {error})"
    kept = [line.rstrip()[:300] for line in text.splitlines() if line.strip()]
    return "\n".join(f"    {line}" for line in kept[-lines:]) or "    (the log is empty)"


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
