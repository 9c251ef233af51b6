"""A vLLM server as a context manager: on loopback, ready only once a real completion came back.

`--quantization` is never passed: vLLM reads it from the artifact and picks the kernel itself; `kernel` says which.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from quantkit.environments.build import sync, tail
from quantkit.environments.run import Process, child_environment
from quantkit.errors import Fault, ToolError
from quantkit.paths import cache_folder
from quantkit.recipe import Serve

START_SECONDS = {"serve-cpu": 600.0, "serve-cuda": 3600.0}
"""At most, until the first completion. A CPU needs one to two minutes; 70B weights from a slow disk half an hour."""
DRAIN_SECONDS = 20
"""What running requests get to finish when a server is asked to end; vLLM's own default is none."""
QUEUE = 512
"""Requests waiting or running beyond which the server answers 503; vLLM's own queue has no bound."""
TARGET_FLAGS = {
    # Compiling costs a minute a start and needs a C++ compiler; decoding gains nothing that README's table could show.
    "serve-cpu": ("--enforce-eager", "--max-num-seqs", "64"),
    "serve-cuda": (),
}
TARGET_VARIABLES = {
    # GiB of KV cache: servers stand side by side in the memory that the machine has.
    "serve-cpu": {"VLLM_CPU_KVCACHE_SPACE": "1"},
    "serve-cuda": {},
}
CAUSES = {
    r"address already in use": "the port is taken: choose another, or leave --port out",
    r"out of memory|OutOfMemory|Cannot allocate memory|Free memory on device": "too little memory is free",
    r"No available memory for the cache|larger than the maximum number of tokens|KV cache is needed": (
        "the KV cache does not fit: lower serve.max_model_len, or serve on more GPUs"
    ),
    r"No such file|not a valid model identifier|Invalid repository|Unrecognized model|config\.json": (
        "the folder is no model that vLLM reads: look at its config.json, or run quantkit verify on it"
    ),
    r"not supported|unsupported|NotImplementedError|No kernel|Failed to find a kernel": (
        "vLLM has no kernel for this artifact on this target: choose another format, or another target"
    ),
    r"Found no NVIDIA driver|CUDA driver|No CUDA GPUs": "the machine has no working NVIDIA driver: serve on target cpu",
    r"ModuleNotFoundError|ImportError|undefined symbol": "the environment is damaged: delete its folder and sync it",
}
"""What a server's log says when it dies (regular expression, case ignored) -> what to do."""
_KERNEL = re.compile(r"(?:Using|Selected) (\w+) for (?:\w+LinearMethod|mixed-precision linear|\w*CompressedTensors\w*)")


class Endpoint:
    """`with Endpoint(folder, environment, serve, log) as endpoint:` serves until the block ends.

    Args:    folder: the model. environment: serve-cpu or serve-cuda. log: where the server's output goes, kept.
             prefix_caching: off, so that no measured run profits from the one before; on for real use.
             port: on loopback; None: a free one.
    Raises:  ToolError on entering: the server ended, or made no completion within START_SECONDS; with the log's tail
             and the likely cause.
    """

    def __init__(
        self,
        folder: Path,
        environment: str,
        serve: Serve,
        log: Path,
        prefix_caching: bool = False,
        port: int | None = None,
    ) -> None:
        self.folder, self.environment, self.log, self.model = folder.resolve(), environment, log, folder.name
        self.port = port or _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        flags = ["--dtype", "auto", "--max-model-len", str(serve.max_model_len), "--seed", "0"]
        flags += ["--max-num-queued-reqs", str(QUEUE), "--shutdown-timeout", str(DRAIN_SECONDS)]
        flags += ["--tensor-parallel-size", str(serve.tensor_parallel)] if serve.tensor_parallel > 1 else []
        flags += [] if prefix_caching else ["--no-enable-prefix-caching"]
        self.flags = (*flags, *TARGET_FLAGS[environment])
        self._process: Process | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self.close, 0)
            self.start()
            self.wait()
            stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(0 if kind else DRAIN_SECONDS)

    def start(self) -> None:
        """Start the server process and return at once."""
        python = sync(self.environment)
        where = ["--model", str(self.folder), "--served-model-name", self.model]
        where += ["--host", "127.0.0.1", "--port", str(self.port)]
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", *where, *self.flags]
        variables = {"VLLM_CACHE_ROOT": str(cache_folder() / "vllm"), **TARGET_VARIABLES[self.environment]}
        self._process = Process(command, child_environment(python, **variables), self.log)

    def wait(self) -> None:
        """Wait for the first completion. Raises ToolError as `with` does."""
        started, limit = time.monotonic(), START_SECONDS[self.environment]
        shape = "{desc}: {n:.0f} s (usually 60 to 120, at most {total:.0f})"
        with tqdm(total=limit, desc=f"starting {self.model}", bar_format=shape, file=sys.stderr) as bar:
            while not self._answers():
                bar.n = time.monotonic() - started
                bar.refresh()
                if bar.n > limit:
                    raise self._error(f"made no completion within {limit:.0f} s")
                time.sleep(0.5)

    def close(self, grace: float = DRAIN_SECONDS) -> None:
        """End the server: asked first where `grace` seconds are given, then by killing all its processes."""
        if self._process is None:
            return
        if grace:
            self._process.terminate(grace)
        else:
            self._process.kill()
        self._process = None

    @property
    def kernel(self) -> str:
        """The kernels of quantized linears that the server's log names; 'none named' for a plain checkpoint."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return ", ".join(sorted(set(_KERNEL.findall(text)))) or "none named"

    def complete(self, prompt: str, max_tokens: int) -> str:
        """The greedy continuation of a prompt. Raises OSError where the server does not answer, or refuses."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        request = urllib.request.Request(  # noqa: S310 - an address of our own
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:  # noqa: S310 - the same
            answer: dict[str, Any] = json.load(reply)
        return str(answer["choices"][0]["text"])

    def _answers(self) -> bool:
        code = self._process.poll() if self._process else 0
        if code is not None:
            raise self._error(f"ended with exit code {code} before it was ready")
        try:
            self.complete("The", 2)
        except urllib.error.HTTPError as error:
            raise self._error(f"refused the first completion: HTTP {error.code} {error.read(300)!r}") from None
        except OSError:
            return False
        return True

    def _error(self, what: str) -> ToolError:
        text = self.log.read_text(encoding="utf-8", errors="replace")
        do = next((do for said, do in CAUSES.items() if re.search(said, text, re.IGNORECASE)), "read the log")
        return ToolError(
            Fault(f"the server of {self.folder} {what}; its log ends:\n{tail(self.log)}", str(self.log), do)
        )


@contextmanager
def together(endpoints: Mapping[str, Endpoint]) -> Iterator[None]:
    """Start several servers at once and wait for all; much of a start runs on one core. Raises as Endpoint does."""
    with ExitStack() as stack:
        for endpoint in endpoints.values():
            stack.push(endpoint.__exit__)
            endpoint.start()
        for endpoint in endpoints.values():
            endpoint.wait()
        yield


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
