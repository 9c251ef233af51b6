"""A hub on this machine, spoken to by the real client: headers first, files at a commit, the cache when offline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.conftest import TinyLlama

REPO, COMMIT = "org/tiny", "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """As much of huggingface.co as a model download needs; `sent` counts the bytes of weights."""

    sent: ClassVar[int] = 0

    def __init__(self, folder: Path, *rest: Any) -> None:
        self.folder = folder
        super().__init__(*rest)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path in (f"/api/models/{REPO}/revision/{name}" for name in ("main", "v1", COMMIT)):
            files = [{"rfilename": p.name, "size": p.stat().st_size} for p in sorted(self.folder.iterdir())]
            return self.answer(json.dumps({"id": REPO, "modelId": REPO, "sha": COMMIT, "siblings": files}).encode())
        if path.startswith(f"/api/models/{REPO}/tree/{COMMIT}"):
            entries = [
                {"type": "file", "path": p.name, "size": p.stat().st_size, "oid": p.name}
                for p in sorted(self.folder.iterdir())
            ]
            return self.answer(json.dumps(entries).encode())
        file = self.folder / path.rpartition("/")[2]
        if path.startswith(f"/{REPO}/resolve/") and file.is_file():
            return self.answer(file.read_bytes(), file)
        code = "RevisionNotFound" if path.startswith(f"/api/models/{REPO}") else "RepoNotFound"
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
        return None

    def answer(self, body: bytes, file: Path | None = None) -> None:
        status, size = 200, len(body)
        if file and (span := self.headers.get("range")):
            first, _, last = span.removeprefix("bytes=").partition("-")
            status, body = 206, body[int(first) : int(last) + 1 if last else None]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if file:
            self.send_header("ETag", f'"{file.name}-{size}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Accept-Ranges", "bytes")
            if status == 206:
                self.send_header("Content-Range", f"bytes {first}-{int(first) + len(body) - 1}/{size}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
            if file and file.suffix == ".safetensors":
                type(self).sent += len(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def repository(tmp_path: Path, tiny_llama: TinyLlama) -> Path:
    folder = tiny_llama(tmp_path / "repository", vocab_size=4096)
    (folder / "README.md").write_text("not wanted")
    return folder


@pytest.fixture
def hub(repository: Path) -> Iterator[str]:
    Hub.sent = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, repository))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def ask(endpoint: str, cache: Path, source: str = REPO, revision: str | None = None, fetch: bool = False) -> Any:
    """Open a hub source in a process of its own (the client reads its endpoint at import); the index, or the faults."""
    code = """
import json, sys
from quantkit.checkpoint.source import materialise, open_source, source_digest
from quantkit.errors import QuantkitError
source, revision, fetch = json.loads(sys.argv[1])
try:
    index = open_source(source, revision, "bfloat16")
    if fetch:
        before = source_digest(index)
        index = materialise(index, revision, "bfloat16")
        assert source_digest(index) == before
    print(index.model_dump_json())
except QuantkitError as error:
    print(json.dumps([type(error).__name__, *map(str, error.faults)]))
assert "torch" not in sys.modules
"""
    environment = os.environ | {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(cache),
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "no_proxy": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([source, revision, fetch])],
        env=environment, cwd=cache.parent, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_index_needs_no_weights_and_the_download_is_that_index(hub: str, repository: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    index = ask(hub, cache)
    assert index["origin"] == f"{REPO}@{COMMIT}"
    assert index["config"] == json.loads((repository / "config.json").read_text())
    assert Hub.sent <= 100_000 < (repository / "model.safetensors").stat().st_size
    assert not list(cache.rglob("*.safetensors"))
    fetched = ask(hub, cache, revision="v1", fetch=True)
    assert fetched == index
    root = Path(fetched["root"])
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (root / name).read_bytes() == (repository / name).read_bytes()
    assert not (root / "README.md").exists()


def test_a_commit_in_the_cache_needs_no_hub(hub: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    fetched = ask(hub, cache, fetch=True)
    nowhere = "http://127.0.0.1:9"
    assert ask(nowhere, cache, revision=COMMIT, fetch=True) == fetched
    assert ask(nowhere, cache, source=f"{REPO}@{COMMIT}") == fetched


def test_a_hand_made_cache_serves_a_branch_offline(repository: Path, tmp_path: Path) -> None:
    home = tmp_path / "cache" / "models--org--tiny"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(COMMIT)
    (home / "snapshots").mkdir()
    repository.rename(home / "snapshots" / COMMIT)
    assert ask("http://127.0.0.1:9", tmp_path / "cache")["origin"] == f"{REPO}@{COMMIT}"


def test_no_hub_and_no_cache_names_the_folder_form(tmp_path: Path) -> None:
    kind, fault = ask("http://127.0.0.1:9", tmp_path / "cache")
    assert kind == "PlanError"
    assert "cannot be reached" in fault and "source: /path/to/folder" in fault


@pytest.mark.parametrize(
    ("source", "revision", "message"),
    [
        ("org/absent", None, "no repository org/absent"),
        (REPO, "v9", "has no revision v9"),
        (f"{REPO}@v1", "v1", "two revisions"),
    ],
)
def test_what_is_not_there_is_named(hub: str, tmp_path: Path, source: str, revision: str | None, message: str) -> None:
    kind, fault = ask(hub, tmp_path / "cache", source, revision)
    assert kind == "PlanError" and message in fault


def test_every_fault_of_a_repository_comes_at_once(hub: str, repository: Path, tmp_path: Path) -> None:
    weights = repository / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (repository / "modeling_own.py").write_text("")
    config = json.loads((repository / "config.json").read_text()) | {"quantization_config": {"quant_method": "awq"}}
    (repository / "config.json").write_text(json.dumps(config))
    kind, *faults = ask(hub, tmp_path / "cache")
    assert kind == "PlanError" and len(faults) == 3
    text = "\n".join(faults)
    assert "promises 100 bytes more" in text and "modeling_own.py" in text and "quantized already (awq)" in text


def test_pickles_on_the_hub_are_refused(hub: str, repository: Path, tmp_path: Path) -> None:
    (repository / "model.safetensors").rename(repository / "pytorch_model.bin")
    kind, *faults = ask(hub, tmp_path / "cache")
    assert kind == "PlanError" and "pickles: pytorch_model.bin" in faults[0]
