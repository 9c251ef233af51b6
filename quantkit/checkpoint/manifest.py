"""quantkit.json: what an artifact is, and the sha256 of every file in it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantkit.errors import ArtifactError, Fault
from quantkit.records import Artifact

MANIFEST = "quantkit.json"
_AGAIN = "get the artifact again, or delete it and run quantkit quantize"


def write_manifest(folder: Path, **fields: Any) -> Artifact:
    """Digest every file of the folder and write quantkit.json, as its last file.

    Args:    fields: those of `Artifact`, without `files` and `bytes`.
    Raises:  ArtifactError: the folder holds a link, or a file that is not finished (`*.part`).
    """
    faults = [*_links(folder)]
    paths = list(_files(folder))
    faults += [Fault("an unfinished file", str(path), "delete it") for path in paths if path.name.endswith(".part")]
    if faults:
        raise ArtifactError(*faults)
    artifact = Artifact(
        files={path.relative_to(folder).as_posix(): _sha256(path) for path in paths},
        bytes=sum(path.stat().st_size for path in paths if path.suffix == ".safetensors"),
        **fields,
    )
    artifact.write(folder / MANIFEST)
    return artifact


def verify_manifest(folder: Path) -> Artifact:
    """The artifact of a folder, after reading every byte of it.

    Raises ArtifactError naming each file that is changed, missing, not in the manifest, or a link.
    """
    artifact = Artifact.read(folder / MANIFEST)
    faults = [*_links(folder)]
    there = {path.relative_to(folder).as_posix(): path for path in _files(folder)}
    for name, digest in artifact.files.items():
        if name not in there:
            faults.append(Fault(f"{name} is missing", str(folder), _AGAIN))
        elif (found := _sha256(there[name])) != digest:
            what = f"{name} was changed: sha256 {found[:16]}..., the manifest says {digest[:16]}..."
            faults.append(Fault(what, str(there[name]), _AGAIN))
    for name in sorted(set(there) - set(artifact.files)):
        faults.append(Fault(f"{name} is not in the manifest", str(there[name]), "remove it from the folder"))
    if faults:
        raise ArtifactError(*faults)
    return artifact


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path != folder / MANIFEST:
            yield path


def _links(folder: Path) -> list[Fault]:
    do = "put the file itself there"
    names = [Path(root) / name for root, folders, files in os.walk(folder) for name in (*folders, *files)]
    return [Fault("a link; an artifact holds its files itself", str(path), do) for path in names if path.is_symlink()]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
