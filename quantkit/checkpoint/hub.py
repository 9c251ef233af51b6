"""Checkpoints of the Hugging Face hub: the index from a few ranged requests, the files only when they are wanted.

A commit that lies complete in the local cache needs no network.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import (
    HfApi,
    constants,
    get_session,
    get_token,
    hf_hub_url,
    hf_raise_for_status,
    snapshot_download,
)
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

from quantkit.checkpoint.index import (
    INDEX_NAME,
    code_faults,
    config_faults,
    disagreements,
    parse_header,
    read_index,
    weight_files,
)
from quantkit.errors import ArtifactError, Fault, PlanError
from quantkit.records import Index, TensorInfo

_SIDE_FILES = ("*.json", "tokenizer*", "vocab*", "merges.txt", "*.model", "*.jinja")
_FIRST_BYTES = 100_000
_TIMEOUT = 15.0
_UNREACHABLE = (httpx2.TransportError, ConnectionError, TimeoutError)
_LOCAL = "check the network, or give the checkpoint as a folder: model: {source: /path/to/folder}"


def open_repository(source: str, revision: str | None) -> Index:
    """The index of `source` (org/name, or org/name@revision) at the commit that the revision names now.

    Raises PlanError: the hub is unreachable and the cache has no such snapshot; no such repository or revision; or
    every fault of the repository (pickles only, custom code, already quantized, broken headers).
    """
    repo, _, inline = source.partition("@")
    if inline and revision:
        do = "keep one of the two"
        raise PlanError(Fault(f"two revisions: {inline} and {revision}", "model.source, model.revision", do))
    wanted = inline or revision or constants.DEFAULT_REVISION
    cached = _cached(repo, wanted)
    if cached is not None and cached.name == wanted:
        try:
            return read_index(cached, f"{repo}@{wanted}")
        except ArtifactError:
            # Not all of it is here: the hub has to say what it is.
            cached = None
    try:
        return _from_hub(repo, wanted)
    except _UNREACHABLE as error:
        if cached is None:
            what = f"the hub cannot be reached ({error}), and the local cache has no complete {repo} at {wanted}"
            raise PlanError(Fault(what, f"model.source: {source}", _LOCAL)) from None
    try:
        return read_index(cached, f"{repo}@{cached.name}")
    except ArtifactError as error:
        what = "the hub cannot be reached, and the snapshot in the local cache has faults"
        raise PlanError(Fault(what, str(cached), _LOCAL), *error.faults) from None


def download(index: Index) -> Index:
    """The repository's safetensors, tokenizer and config files in the hub's own local cache, at the index's commit.

    Raises PlanError: unreachable, or too little disk. ArtifactError: what came differs from what was announced.
    """
    repo, _, commit = index.origin.partition("@")
    shards = sorted({tensor.file for tensor in index.tensors.values()})
    missing = sum(tensor.bytes for tensor in index.tensors.values() if not (index.root / tensor.file).exists())
    cache = Path(constants.HF_HUB_CACHE)
    if missing:
        cache.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(cache).free
        if missing > free:
            what = f"{repo}: {missing >> 20} MiB to download, {free >> 20} MiB free"
            raise PlanError(Fault(what, str(cache), "free some space, or set HF_HOME to a larger disk"))
        try:
            snapshot_download(repo, revision=commit, allow_patterns=[*_SIDE_FILES, *shards])
        except (*_UNREACHABLE, HfHubHTTPError) as error:
            what = f"the download stopped: {error}"
            do = f"run the command again, it continues; or {_LOCAL}"
            raise PlanError(Fault(what, f"model.source: {index.origin}", do)) from None
    here = read_index(index.root, index.origin)
    if here.tensors != index.tensors:
        do = "delete the folder and run the command again"
        raise ArtifactError(Fault("the downloaded files are not what the hub announced", str(index.root), do))
    return here


def _cached(repo: str, revision: str) -> Path | None:
    """The snapshot folder of a revision in the hub's local cache: whole or not."""
    home = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    reference = home / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    snapshot = home / "snapshots" / commit
    return snapshot if re.fullmatch(r"[0-9a-f]{40}", commit) and snapshot.is_dir() else None


def _from_hub(repo: str, revision: str) -> Index:
    where = f"https hub: {repo}@{revision}"
    try:
        info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=_TIMEOUT)
    except GatedRepoError:
        do = "accept its terms on the hub, then log in with `hf auth login`"
        raise PlanError(Fault(f"{repo} is gated", where, do)) from None
    except RevisionNotFoundError:
        raise PlanError(Fault(f"{repo} has no revision {revision}", where, "correct model.revision")) from None
    except RepositoryNotFoundError:
        do = "correct model.source (no such folder exists here either), or log in with `hf auth login` if it is private"
        raise PlanError(Fault(f"no repository {repo}", where, do)) from None
    except HfHubHTTPError as error:
        raise PlanError(Fault(f"the hub answered: {error}", where, _LOCAL)) from None
    commit = str(info.sha)
    sizes = {entry.rfilename: int(entry.size or 0) for entry in info.siblings or () if "/" not in entry.rfilename}
    faults = code_faults(list(sizes), where)
    config = _json(repo, commit, "config.json", sizes, faults)
    faults += config_faults(config, f"{where}: config.json")
    index_file = _json(repo, commit, INDEX_NAME, sizes, faults) if INDEX_NAME in sizes else None
    weight_map, files = weight_files(list(sizes), index_file, where, faults)
    headers: dict[str, dict[str, TensorInfo]] = {}
    for file in files:
        if file not in sizes:
            faults.append(Fault("this shard is missing", f"{where}: {file}", "use another revision"))
            continue
        try:
            headers[file] = _header(repo, commit, file, sizes[file])
        except ArtifactError as error:
            faults += error.faults
    faults += disagreements(headers, weight_map, where)
    if faults:
        raise PlanError(*faults)
    return Index(
        root=Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "snapshots" / commit,
        config=config,
        tensors=dict(sorted((name, tensor) for header in headers.values() for name, tensor in header.items())),
        origin=f"{repo}@{commit}",
    )


def _header(repo: str, commit: str, file: str, size: int) -> dict[str, TensorInfo]:
    where = f"{repo}@{commit}: {file}"
    first = _fetch(repo, commit, file, 0, min(size, _FIRST_BYTES))
    length = int.from_bytes(first[:8], "little")
    if length > size - 8:
        what = f"truncated, or no safetensors file: a header of {length:,} bytes in a file of {size:,}"
        raise ArtifactError(Fault(what, where, "use another revision"))
    header = first[8 : 8 + length]
    if len(header) < length:
        header += _fetch(repo, commit, file, 8 + len(header), 8 + length)
    return parse_header(header, file, where, size - 8 - length)


def _json(repo: str, commit: str, file: str, sizes: Mapping[str, int], faults: list[Fault]) -> dict[str, Any]:
    where = f"{repo}@{commit}: {file}"
    if file not in sizes:
        faults.append(Fault(f"no {file}", where, "give a repository of a transformers model"))
        return {}
    try:
        value = json.loads(_fetch(repo, commit, file, 0, None))
        if isinstance(value, dict):
            return value
        faults.append(Fault("not a JSON object", where, "use another revision"))
    except ValueError as error:
        faults.append(Fault(f"unreadable JSON: {error}", where, "use another revision"))
    return {}


def _fetch(repo: str, commit: str, file: str, start: int, end: int | None) -> bytes:
    """Bytes start..end of a file (None: to its end), without the cache."""
    token = get_token()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    if end is not None:
        headers["range"] = f"bytes={start}-{end - 1}"
    url = hf_hub_url(repo, file, revision=commit)
    response = get_session().get(url, headers=headers, timeout=_TIMEOUT, follow_redirects=True)
    hf_raise_for_status(response)
    return bytes(response.content)
