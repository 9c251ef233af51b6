"""What a recipe's `model.source` may be, and that the digest of a source changes when its content does."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.checkpoint.source import materialise, open_source, source_digest
from quantkit.errors import PlanError
from tests.conftest import TinyLlama


def test_a_folder_is_its_own_index_and_nothing_is_made(
    tmp_path: Path, tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_llama(tmp_path / "models" / "tiny")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    # A folder of the form org/name is a folder, not a hub id.
    index = open_source("models/tiny", None, "bfloat16")
    assert index.root == tmp_path / "models" / "tiny" and index.quantized_origin is None
    assert materialise(index, None, "bfloat16") == index
    assert sorted(tmp_path.rglob("*")) == before


def test_the_faults_of_a_folder_are_faults_of_the_plan(tmp_path: Path, tiny_llama: TinyLlama) -> None:
    folder = tiny_llama(tmp_path / "m")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (folder / "config.json").unlink()
    with pytest.raises(PlanError) as caught:
        open_source(str(folder), None, "bfloat16")
    assert len(caught.value.faults) == 2


def test_a_revision_belongs_to_a_hub_id(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="has no revision"):
        open_source(str(tmp_path), "main", "bfloat16")


def test_the_digest_sees_config_and_weights_and_not_the_place(tmp_path: Path, tiny_llama: TinyLlama) -> None:
    def digest(name: str, **changes: object) -> str:
        return source_digest(open_source(str(tiny_llama(tmp_path / name, **changes)), None, "bfloat16"))

    assert digest("a") == digest("b")
    others = [digest("c", seed=1), digest("d", rms_norm_eps=1e-6), digest("e", tied=True), digest("f", dtype="float16")]
    assert len({digest("a"), *others}) == 5
