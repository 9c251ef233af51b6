"""One flipped bit, one file more or less, one link: verification fails and names the file."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit.checkpoint.manifest import verify_manifest, write_manifest
from quantkit.errors import ArtifactError

FIELDS: dict[str, Any] = {
    "variant": "awq",
    "method": "awq",
    "format": "awq",
    "origin": "here",
    "quantized_origin": None,
    "recipe_digest": "0",
    "versions": {},
}
CONTENTS = {"model.safetensors": b"weights" * 9, "config.json": b"{}", "sub/vocab.txt": b"a\nb\n"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in CONTENTS.items():
        path = tmp_path / "artifact" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "artifact"


def test_a_manifest_digests_every_file_and_verifies(folder: Path) -> None:
    artifact = write_manifest(folder, **FIELDS)
    assert artifact.files == {name: hashlib.sha256(content).hexdigest() for name, content in CONTENTS.items()}
    assert artifact.bytes == 63
    assert verify_manifest(folder) == artifact


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(name=st.sampled_from(sorted(CONTENTS)), place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found_and_its_file_named(folder: Path, name: str, place: int, bit: int) -> None:
    for each, content in CONTENTS.items():
        (folder / each).write_bytes(content)
    write_manifest(folder, **FIELDS)
    flipped = bytearray(CONTENTS[name])
    flipped[place % len(flipped)] ^= 1 << bit
    (folder / name).write_bytes(flipped)
    with pytest.raises(ArtifactError) as caught:
        verify_manifest(folder)
    assert [fault.what.split()[0] for fault in caught.value.faults] == [name]


def test_missing_extra_and_linked_files_are_all_named(folder: Path) -> None:
    write_manifest(folder, **FIELDS)
    (folder / "config.json").unlink()
    (folder / "extra.bin").write_bytes(b"x")
    (folder / "link").symlink_to(folder / "model.safetensors")
    with pytest.raises(ArtifactError) as caught:
        verify_manifest(folder)
    text = str(caught.value)
    assert len(caught.value.faults) == 3
    assert "config.json is missing" in text and "extra.bin is not in the manifest" in text and "a link" in text


def test_a_link_or_an_unfinished_file_gets_no_manifest(folder: Path) -> None:
    (folder / ".model.safetensors.1.part").write_bytes(b"half")
    (folder / "linked").symlink_to(folder / "sub", target_is_directory=True)
    with pytest.raises(ArtifactError) as caught:
        write_manifest(folder, **FIELDS)
    assert len(caught.value.faults) == 2
    assert not (folder / "quantkit.json").exists()


def test_no_manifest_is_an_artifact_error(folder: Path) -> None:
    with pytest.raises(ArtifactError, match="Artifact"):
        verify_manifest(folder)
