"""Run things inside tool environments: a job with JSON in and JSON out, or any command, and never leave an orphan."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from quantkit.environments.build import sync, tail
from quantkit.errors import Fault, ToolError

JOBS = Path(__file__).with_name("jobs")
SUPERVISOR = Path(__file__).with_name("supervise.py")
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|_KEY$|_AUTH$", re.IGNORECASE)
_OURS = re.compile(r"^(PYTHON|VIRTUAL_ENV|CONDA|PIP_|QUANTKIT)")


def run_job(name: str, job: str, request: dict[str, Any], timeout: float, log: Path) -> dict[str, Any]:
    """Run jobs/JOB.py in environment NAME and return its answer.

    Args:    request: plain data, handed over as a JSON file. timeout: seconds, after which all its processes are
             killed. log: where its output goes.
    Raises:  ToolError with the log's tail: it failed, ran out of time, or answered nothing.
    """
    with Job(name, job, request, timeout, log) as running:
        while not running.done():
            time.sleep(0.1)
        return running.answer()


class Job:
    """A job that runs while the caller does something else; leaving the context kills what is left of it."""

    def __init__(self, name: str, job: str, request: dict[str, Any], timeout: float, log: Path) -> None:
        self.title = f"job {job} in environment {name}"
        self.log, self.timeout = log, timeout
        self._name, self._script, self._request = name, JOBS / f"{job}.py", request

    def __enter__(self) -> Self:
        python = sync(self._name)
        self._scratch = tempfile.TemporaryDirectory(prefix="quantkit-job-")
        folder = Path(self._scratch.name)
        self._answer = folder / "answer.json"
        (folder / "request.json").write_text(json.dumps(self._request), encoding="utf-8")
        command = [str(python), str(self._script), str(folder / "request.json"), str(self._answer)]
        self._process = Process(command, child_environment(python), self.log)
        self._deadline = time.monotonic() + self.timeout
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._scratch.cleanup()

    def done(self) -> bool:
        """Whether it ended. Raises ToolError where its time is up; it is killed then."""
        if self._process.poll() is not None:
            return True
        if time.monotonic() > self._deadline:
            self._process.kill()
            raise self._error(f"did not end within {self.timeout:.0f} s and was killed")
        return False

    def answer(self) -> dict[str, Any]:
        """What it answered. Raises ToolError where it failed."""
        code = self._process.poll()
        if code != 0:
            raise self._error(f"ended with exit code {code}")
        try:
            answer = json.loads(self._answer.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self._error(f"answered nothing readable ({error})") from None
        if not isinstance(answer, dict):
            raise self._error("answered no JSON object")
        return answer

    def _error(self, what: str) -> ToolError:
        return ToolError(Fault(f"{self.title} {what}; its log ends:\n{tail(self.log)}", str(self.log), "read the log"))


class Process:
    """A command under supervise.py: its descendants end with it, with us (even by SIGKILL), or by `kill`."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-S", "-E", str(SUPERVISOR), *command],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """The exit code (128 + N where signal N ended it), None while it runs."""
        return self._supervisor.poll()

    def terminate(self, grace: float) -> None:
        """Ask it to end (SIGTERM), and kill what is left after `grace` seconds."""
        if self.poll() is None:
            self._supervisor.terminate()
            try:
                self._supervisor.wait(grace)
            except subprocess.TimeoutExpired:
                self.kill()
        self.kill()

    def kill(self) -> None:
        """Kill all of it, and return when it is gone."""
        if self._supervisor.stdin:
            self._supervisor.stdin.close()
        self._supervisor.wait()


def child_environment(python: Path, **more: str) -> dict[str, str]:
    """The environment variables of a tool: ours without secrets and Python settings; offline, without telemetry."""
    kept = {k: v for k, v in os.environ.items() if not _SECRET.search(k) and not _OURS.match(k)}
    return kept | {
        # The compilers and launchers of the environment are found by name.
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        "PYTHONUNBUFFERED": "1",
        **more,
    }
