"""The MLflow registry: the chosen variant as a model version beside its evidence. The alias moves last.

A version is known by two digests, of the manifest (so of every file) and of the verdict: publishing the same again
finds it and adds nothing.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.checkpoint.manifest import MANIFEST, verify_manifest
from quantkit.errors import ArtifactError, Fault, PublishError
from quantkit.recipe import Publish, Recipe
from quantkit.records import Artifact, Scores, Timings, Verdict

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

EVIDENCE = ("run.json", "plan.json", "ledger.jsonl", "verdict.json", "report.html", "report.md", "junit.xml")
EVIDENCE_FOLDERS = ("scores", "timings")
MANIFEST_TAG, VERDICT_TAG = "quantkit.manifest_sha256", "quantkit.verdict_sha256"
DATABASE = "mlflow.db"
EXPERIMENT = "quantkit"


def publish(run: Path, recipe: Recipe, verdict: Verdict) -> dict[str, str]:
    """Register what the verdict chose: files, evidence, read back and compared, version, then the alias.

    Args:    run: its folder; the database of the uri 'sqlite' lies beside it.
    Returns: name, version, alias, uri, variant, and where the registry keeps the files.
    Raises:  PublishError: nothing was chosen, or the registry refused, or gave back other bytes.
             ArtifactError: the artifact is not as it was made.
    """
    asked, folder = _agreed(run, recipe, verdict)
    artifact = verify_manifest(folder)
    tags = {
        MANIFEST_TAG: _sha256(folder / MANIFEST),
        VERDICT_TAG: _sha256(run / "verdict.json"),
        "quantkit.variant": artifact.variant,
        "quantkit.origin": artifact.origin,
    }
    with connected(tracking_uri(asked.uri, run.parent)) as client:
        version = _known(client, asked.name, tags) or _register(client, run, asked.name, artifact, tags)
        if client.get_registered_model(asked.name).aliases.get(asked.alias) != version.version:
            client.set_registered_model_alias(asked.name, asked.alias, version.version)
    return {
        "name": asked.name,
        "version": version.version,
        "alias": asked.alias,
        "uri": f"models:/{asked.name}@{asked.alias}",
        "variant": artifact.variant,
        "kept": str(version.source),
    }


def tracking_uri(uri: str, runs: Path) -> str:
    return f"sqlite:///{(runs / DATABASE).resolve()}" if uri == "sqlite" else uri


@contextmanager
def connected(uri: str) -> Iterator[MlflowClient]:
    """A client whose every failure is a PublishError without the credentials that a URI may hold."""
    os.environ.update(MLFLOW_DISABLE_TELEMETRY="true", DO_NOT_TRACK="true")
    shown = without_userinfo(uri)
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError
    except ImportError as error:
        raise PublishError(Fault(f"no MLflow here: {error}", shown, "pip install 'quantkit[mlflow]'")) from None
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        yield MlflowClient(uri, uri)
    except (MlflowException, SQLAlchemyError, OSError) as error:
        what = f"the registry refused: {without_userinfo(str(error))}"
        raise PublishError(Fault(what, shown, "mend that and run: quantkit publish RUN; the run is kept")) from None


def without_userinfo(text: str) -> str:
    return re.sub(r"(?<=://)[^/@\s]*@", "", text)


def check_version(version: ModelVersion, uri: str) -> Artifact:
    """Read a version's files back and check every digest, that of the manifest against the version's tag too.

    Raises ArtifactError naming what differs.
    """
    from mlflow.artifacts import download_artifacts

    name = f"models:/{version.name}/{version.version}"
    with tempfile.TemporaryDirectory(prefix="quantkit-verify-") as scratch:
        # Files on this machine are read where they lie; others are fetched.
        dst = None if str(version.source).startswith("file:") else scratch
        folder = Path(download_artifacts(artifact_uri=version.source, dst_path=dst, tracking_uri=uri))
        artifact = verify_manifest(folder)
        found, tagged = _sha256(folder / MANIFEST), version.tags.get(MANIFEST_TAG)
        if found != tagged:
            what = f"{MANIFEST} has sha256 {found[:16]}..., the version was registered with {str(tagged)[:16]}..."
            raise ArtifactError(Fault(what, name, "do not serve it; publish the run again"))
    return artifact


def _agreed(run: Path, recipe: Recipe, verdict: Verdict) -> tuple[Publish, Path]:
    where = str(run / "verdict.json")
    if recipe.publish is None:
        raise PublishError(Fault("the recipe names no registry", str(run / "run.json"), "add a section 'publish'"))
    if verdict.chosen is None:
        do = "read its reasons in report.html; nothing that failed is published"
        raise PublishError(Fault("no variant passed its gates", where, do))
    return recipe.publish, run / "artifacts" / verdict.chosen


def _known(client: MlflowClient, name: str, tags: dict[str, str]) -> ModelVersion | None:
    """The version that holds these very files and this verdict, where there is one and its files are whole."""
    for version in client.search_model_versions(f"name='{name}'"):
        if all(version.tags.get(tag) == tags[tag] for tag in (MANIFEST_TAG, VERDICT_TAG)):
            check_version(version, client.tracking_uri)
            return version
    return None


def _register(client: MlflowClient, run: Path, name: str, artifact: Artifact, tags: dict[str, str]) -> ModelVersion:
    from mlflow.entities import RunStatus

    logged = client.create_run(_experiment(client), run_name=f"{run.name} {artifact.variant}", tags=tags)
    number, done = logged.info.run_id, RunStatus.to_string(RunStatus.FAILED)
    try:
        for metric, value in _metrics(run, artifact.variant).items():
            client.log_metric(number, metric, value)
        client.log_artifacts(number, str(run / "artifacts" / artifact.variant), "model")
        for path in (run / file for file in EVIDENCE):
            if path.exists():
                client.log_artifact(number, str(path), "evidence")
        for folder in (run / part for part in EVIDENCE_FOLDERS):
            if folder.exists():
                client.log_artifacts(number, str(folder), f"evidence/{folder.name}")
        if not client.search_registered_models(f"name='{name}'"):
            client.create_registered_model(name)
        source = f"{logged.info.artifact_uri}/model"
        version = client.create_model_version(name, source, number, tags, description=_description(run, artifact))
        # A version that reads back wrong stays without alias, so nobody serves it.
        check_version(version, client.tracking_uri)
        done = RunStatus.to_string(RunStatus.FINISHED)
    finally:
        client.set_terminated(number, done)
    return version


def _experiment(client: MlflowClient) -> str:
    """The id of the experiment that holds the runs; a database of ours keeps its files beside itself."""
    found = client.get_experiment_by_name(EXPERIMENT)
    if found is not None:
        return str(found.experiment_id)
    database = re.fullmatch(r"sqlite:///(.+)", client.tracking_uri)
    location = (Path(database[1]).resolve().parent / "mlartifacts").as_uri() if database else None
    return str(client.create_experiment(EXPERIMENT, artifact_location=location))


def _metrics(run: Path, variant: str) -> dict[str, float]:
    scores = [Scores.read(path) for path in sorted((run / "scores" / variant).glob("*.json"))]
    found = {f"{one.suite}.{task}": score.value for one in scores for task, score in one.tasks.items()}
    timings = run / "timings" / f"{variant}.json"
    if timings.exists():
        for regime in Timings.read(timings).regimes:
            found[f"throughput_ratio.c{regime.concurrency}"] = regime.ratio
    return found


def _description(run: Path, artifact: Artifact) -> str:
    before = f" (which was quantized before: {artifact.quantized_origin})" if artifact.quantized_origin else ""
    verdict: Any = Verdict.read(run / "verdict.json").variants[artifact.variant]
    return "\n".join((f"{artifact.variant} ({artifact.format}) of {artifact.origin}{before}", *verdict.why))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
