"""`quantkit verify`: is an artifact, in a folder or a registry, byte for byte what was made?"""

from __future__ import annotations

import os
import re
from pathlib import Path

from quantkit.checkpoint.manifest import verify_manifest
from quantkit.errors import Fault, PublishError
from quantkit.publish.registry import DATABASE, check_version, connected, tracking_uri
from quantkit.records import Artifact


def verify(target: str, uri: str | None = None) -> Artifact:
    """Check every digest of TARGET: an artifact folder, models:/NAME@ALIAS or models:/NAME/VERSION.

    Args:    uri: MLflow tracking URI; None: $MLFLOW_TRACKING_URI, or the database in ./runs.
    Raises:  ArtifactError naming each file that is changed, missing or extra. PublishError: no such registered model.
    """
    if not target.startswith("models:/"):
        return verify_manifest(Path(target))
    named = re.fullmatch(r"models:/([^/@]+)(?:@([^/@]+)|/(\d+))", target)
    if named is None:
        raise PublishError(Fault("no such address", target, "write models:/NAME@ALIAS or models:/NAME/VERSION"))
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        if not (Path("runs") / DATABASE).exists():
            raise PublishError(Fault(f"no registry: there is no runs/{DATABASE} here", target, "give --uri"))
        uri = tracking_uri("sqlite", Path("runs"))
    with connected(uri) as client:
        name, alias, number = named.groups()
        version = client.get_model_version_by_alias(name, alias) if alias else client.get_model_version(name, number)
        return check_version(version, uri)
