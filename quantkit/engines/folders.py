"""The folders that an engine fills: whether they are finished, the scratch of an interrupted run, the manifest."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from quantkit.checkpoint.manifest import MANIFEST, verify_manifest, write_manifest
from quantkit.errors import ArtifactError, Fault
from quantkit.records import Artifact, Index, Record, VariantPlan

_PACKAGES = ("quantkit", "torch", "transformers", "compressed-tensors", "safetensors")


class Key(Record):
    """What a scratch folder belongs to."""

    recipe: str
    tokens: str = ""
    """sha256 of the calibration tokens, where there are any."""


def complete(folder: Path, recipe_digest: str) -> bool:
    """Whether the folder holds a finished artifact of this run, every byte of it read."""
    if not (folder / MANIFEST).exists():
        return False
    return Artifact.read(folder / MANIFEST).recipe_digest == recipe_digest and bool(verify_manifest(folder))


def scratch(artifacts: Path, folders: Mapping[str, Path], key: Key) -> Path:
    """The scratch folder of this run; what an unfinished run under other settings left is removed.

    Raises ArtifactError where the artifact of another run stands in the way.
    """
    for folder in folders.values():
        if (folder / MANIFEST).exists() and Artifact.read(folder / MANIFEST).recipe_digest != key.recipe:
            do = "give the recipe another name, or delete that folder"
            raise ArtifactError(Fault("the artifact of another recipe stands here", str(folder), do))
    work = artifacts / ".work"
    if not (work / "key.json").exists() or Key.read(work / "key.json") != key:
        for stale in (work, *folders.values()):
            shutil.rmtree(stale, ignore_errors=True)
        key.write(work / "key.json")
    for draft in (path for folder in folders.values() for path in folder.glob(".*.part")):
        draft.unlink()  # of a run that was killed while it wrote
    return work


def fused_names(fused: Sequence[tuple[str, ...]], names: Sequence[str], ignored: Sequence[str]) -> dict[str, str]:
    """By kept linear: what vLLM calls the linear that it is fused into."""
    return {
        name: name.removesuffix(part) + whole
        for name in ignored
        for parts, whole in zip(fused, names, strict=True)
        for part in parts
        if name.endswith("." + part)
    }


def seal(folder: Path, index: Index, variant: VariantPlan, recipe_digest: str) -> None:
    """Write the manifest: the artifact is complete and was checked."""
    write_manifest(
        folder,
        variant=variant.name,
        method=variant.method,
        format=variant.format,
        origin=index.origin,
        quantized_origin=index.quantized_origin,
        recipe_digest=recipe_digest,
        versions={package: version(package) for package in _PACKAGES},
    )
