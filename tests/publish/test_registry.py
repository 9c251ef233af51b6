"""Laws of publishing, on a real MLflow and database: what failed gets no alias, what is changed is seen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.checkpoint.manifest import write_manifest
from quantkit.errors import ArtifactError, PublishError, QuantkitError
from quantkit.publish.registry import connected, publish, tracking_uri, without_userinfo
from quantkit.publish.verify import verify
from quantkit.recipe import Recipe
from quantkit.records import Verdict

RECIPE = {
    "name": "small",
    "model": {"source": "somewhere"},
    "variants": {"awq": {"method": "awq"}},
    "gates": {"accuracy": {"required": {"perplexity": {"max_ratio": 1.15}}}},
    "publish": {"name": "small-model", "alias": "champion"},
}

pytest.importorskip("mlflow")


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's tables and nothing in them; to make one takes seconds, to copy it nothing."""
    folder = tmp_path_factory.mktemp("mlflow")
    with connected(tracking_uri("sqlite", folder)) as client:
        client.search_experiments()
    return folder / "mlflow.db"


MakeRun = Callable[..., tuple[Path, Recipe, Verdict]]


@pytest.fixture
def make(tmp_path: Path, empty_database: Path) -> MakeRun:
    """make(chosen="awq", weights=b"...", why="..."): a judged run with one artifact."""
    (tmp_path / "runs").mkdir()
    shutil.copy(empty_database, tmp_path / "runs" / "mlflow.db")

    def make(
        chosen: str | None = "awq", weights: bytes = b"weights", why: str = "passed"
    ) -> tuple[Path, Recipe, Verdict]:
        run = tmp_path / "runs" / "small"
        folder = run / "artifacts" / "awq"
        (folder / "deep").mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").write_bytes(weights)
        (folder / "deep" / "config.json").write_text("{}")
        facts: dict[str, Any] = dict.fromkeys(("method", "format", "origin", "recipe_digest"), "x")
        (folder / "quantkit.json").unlink(missing_ok=True)
        write_manifest(folder, variant="awq", quantized_origin=None, versions={}, **facts)
        one = {"accuracy": "pass", "throughput": "not measured", "bytes": 7, "why": [why], "judgements": []}
        verdict = Verdict.model_validate_json(
            json.dumps({"chosen": chosen, "objective": "size", "variants": {"awq": one}, "source_bytes": 9})
        )
        verdict.write(run / "verdict.json")
        (run / "ledger.jsonl").write_text('{"module": "a"}\n')
        return run, Recipe.of(RECIPE), verdict

    return make


def kept(done: dict[str, str]) -> Path:
    return Path(done["kept"].removeprefix("file://"))


def uri_of(run: Path) -> str:
    return tracking_uri("sqlite", run.parent)


def test_what_is_registered_is_what_was_made_with_its_evidence(make: MakeRun) -> None:
    run, recipe, verdict = make()
    done = publish(run, recipe, verdict)
    folder = run / "artifacts" / "awq"
    for path in folder.rglob("*"):
        if path.is_file():
            assert (kept(done) / path.relative_to(folder)).read_bytes() == path.read_bytes()
    evidence = kept(done).parent / "evidence"
    assert (evidence / "verdict.json").read_bytes() == (run / "verdict.json").read_bytes()
    assert (evidence / "ledger.jsonl").read_bytes() == (run / "ledger.jsonl").read_bytes()
    assert verify(done["uri"], uri_of(run)) == verify(str(folder))
    assert verify(f"models:/small-model/{done['version']}", uri_of(run)).variant == "awq"


def test_publishing_the_same_again_adds_nothing(make: MakeRun) -> None:
    assert publish(*make()) == publish(*make())


@pytest.mark.parametrize("change", [{"weights": b"other weights"}, {"why": "measured anew"}])
def test_other_files_or_another_verdict_make_a_new_version_and_move_the_alias(
    make: MakeRun, change: dict[str, Any]
) -> None:
    first = publish(*make())
    run, recipe, verdict = make(**change)
    second = publish(run, recipe, verdict)
    assert int(second["version"]) == int(first["version"]) + 1
    with connected(uri_of(run)) as client:
        assert client.get_model_version_by_alias("small-model", "champion").version == second["version"]


def test_nothing_is_registered_where_nothing_passed(make: MakeRun) -> None:
    run, recipe, verdict = make(chosen=None)
    with pytest.raises(PublishError, match="no variant passed"):
        publish(run, recipe, verdict)
    with connected(uri_of(run)) as client:
        assert client.search_registered_models() == []


def test_a_damaged_artifact_is_refused_and_the_alias_stays(make: MakeRun) -> None:
    run, recipe, verdict = make()
    first = publish(run, recipe, verdict)
    (run / "artifacts" / "awq" / "model.safetensors").write_bytes(b"tampered")
    with pytest.raises(ArtifactError, match=r"model\.safetensors was changed"):
        publish(run, recipe, verdict)
    assert verify(first["uri"], uri_of(run)).variant == "awq"


def change_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"tampered")


def change_weights_and_manifest(folder: Path) -> None:
    change_weights(folder)
    (folder / "quantkit.json").unlink()
    facts: dict[str, Any] = dict.fromkeys(("method", "format", "origin", "recipe_digest"), "x")
    write_manifest(folder, variant="awq", quantized_origin=None, versions={}, **facts)


@pytest.mark.parametrize(
    "change",
    [
        change_weights,
        change_weights_and_manifest,
        lambda folder: (folder / "deep" / "config.json").unlink(),
        lambda folder: (folder / "extra.py").write_text("print()"),
        lambda folder: (folder / "quantkit.json").write_text("{}"),
    ],
)
def test_every_change_behind_the_registrys_back_is_seen(make: MakeRun, change: Callable[[Path], object]) -> None:
    run, recipe, verdict = make()
    done = publish(run, recipe, verdict)
    change(kept(done))
    with pytest.raises(ArtifactError):
        verify(done["uri"], uri_of(run))
    with pytest.raises(ArtifactError):
        publish(run, recipe, verdict)


def test_an_upload_that_is_cut_short_moves_no_alias(make: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    first = publish(*make())
    whole = MlflowClient.log_artifacts

    def cut(self: Any, number: str, local: str, path: str | None = None) -> None:
        if path != "model":
            return whole(self, number, local, path)
        raise OSError("disk full")

    monkeypatch.setattr(MlflowClient, "log_artifacts", cut)
    run, recipe, verdict = make(weights=b"new")
    with pytest.raises(PublishError, match="disk full"):
        publish(run, recipe, verdict)
    monkeypatch.undo()
    with connected(uri_of(run)) as client:
        assert client.get_model_version_by_alias("small-model", "champion").version == first["version"]
    assert int(publish(run, recipe, verdict)["version"]) == int(first["version"]) + 1


@pytest.mark.parametrize(
    "target", ["models:/nobody@champion", "models:/nobody/1", "models:/small-model", "models:/a/b/c"]
)
def test_an_unknown_model_is_one_clear_error(make: MakeRun, target: str) -> None:
    with pytest.raises(PublishError):
        verify(target, uri_of(make()[0]))


def test_a_folder_that_holds_no_artifact_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError):
        verify(str(tmp_path / "nothing"))


def test_without_a_registry_here_none_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(PublishError, match="no registry"):
        verify("models:/small-model@champion")
    assert list(tmp_path.iterdir()) == []


def test_no_error_names_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(QuantkitError) as caught:
        verify("models:/a@b", "http://me:hunter2@127.0.0.1:9")
    assert "hunter2" not in str(caught.value)
    assert without_userinfo("postgresql://me:hunter2@host/db") == "postgresql://host/db"
