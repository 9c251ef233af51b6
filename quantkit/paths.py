"""Where quantkit finds the data folders that a user edits, and where it keeps what can be made again."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

_PACKAGE = Path(__file__).parent


def cache_folder() -> Path:
    """Tool environments and converted checkpoints: $QUANTKIT_CACHE, or the user's cache folder."""
    chosen = os.environ.get("QUANTKIT_CACHE")
    return Path(chosen) if chosen else platformdirs.user_cache_path("quantkit")


def find_data(kind: str, name: str) -> Path | None:
    """The YAML file `name` of a data folder (`kind` is 'calibration' or 'evals').

    `name` may be the path of a file. Otherwise ./KIND/NAME.yaml, then the copy that came with quantkit; None: nowhere.
    """
    if name.endswith((".yaml", ".yml")):
        return Path(name) if Path(name).is_file() else None
    for folder in (Path.cwd() / kind, _PACKAGE.parent / kind, _PACKAGE / "data" / kind):
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    return None


def known_data(kind: str) -> list[str]:
    """The names that `find_data` knows for this kind, sorted."""
    folders = (Path.cwd() / kind, _PACKAGE.parent / kind, _PACKAGE / "data" / kind)
    return sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
