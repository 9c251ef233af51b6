"""The import rules of the design, read from the source: which room may know which, and what stays out of the CLI."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "quantkit"
FILES = sorted(PACKAGE.rglob("*.py"))

BASE = {"errors", "records", "paths"}
LOW = {"recipe", "families", "texts"}
MIDDLE = {"plan", "gates", "checkpoint", "environments"}
ROOMS = {"calibrate", "solve", "pack", "engines", "evaluate", "serve", "publish", "deploy", "report"}
TOP = {"cli", "pipeline", "alone", "journal"}
MAPS = {"pipeline", "alone"}
"""The two that put rooms together."""

ALLOWED: dict[str, set[str]] = {
    **dict.fromkeys(BASE, BASE),
    **dict.fromkeys(LOW, BASE),
    **dict.fromkeys(MIDDLE, BASE | LOW),
    **dict.fromkeys(ROOMS, BASE | LOW | MIDDLE),
    "solve": {"errors", "records"},
    "pack": {"errors", "records"},
    "engines": BASE | LOW | MIDDLE | {"calibrate", "solve", "pack"},
    "journal": BASE | LOW,
    **dict.fromkeys(MAPS, BASE | LOW | MIDDLE | ROOMS | {"journal"}),
    "cli": BASE | LOW | MIDDLE | ROOMS | MAPS,
}
TOOLS = {"vllm", "llmcompressor", "gptqmodel", "awq", "autoawq", "auto_gptq"}
NO_TORCH = ("cli.py", "recipe.py", "plan/", "gates/", "checkpoint/index.py", "records.py", "errors.py", "families.py")


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path, runtime_only: bool = False) -> set[str]:
    """Dotted names that a file imports, those inside functions too; without TYPE_CHECKING blocks where asked."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped: set[int] = set()
    if runtime_only:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                skipped |= {id(inner) for inner in ast.walk(node)}
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows_go_one_way(path: Path) -> None:
    if "jobs" in path.parts:
        assert not any(name.split(".")[0] == "quantkit" for name in imports(path)), "a job imports quantkit"
        return
    known = {name.split(".")[1] for name in imports(path) if name.startswith("quantkit.")}
    known &= {room(file) for file in FILES}
    here = room(path)
    if here != "__init__":
        assert known <= ALLOWED[here] | {here}, f"{here} may not import {known - ALLOWED[here] - {here}}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_tools_stay_in_their_environments(path: Path) -> None:
    roots = {name.split(".")[0] for name in imports(path)}
    assert "jobs" in path.parts or not roots & TOOLS
    relative = str(path.relative_to(PACKAGE))
    if relative.startswith(NO_TORCH):
        assert "torch" not in {name.split(".")[0] for name in imports(path, runtime_only=True)}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_is_a_room(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 350
    assert len(path.relative_to(PACKAGE).parts) <= 3
    assert path.stem not in {"utils", "common", "helpers", "base", "misc"}


def test_the_help_text_imports_nothing_heavy() -> None:
    code = "import sys; from click.testing import CliRunner; from quantkit.cli import cli;"
    code += "assert CliRunner().invoke(cli, ['--help']).exit_code == 0;"
    code += "print([m for m in ('torch', 'transformers', 'lm_eval', 'mlflow', 'pydantic') if m in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


def test_planning_imports_no_torch() -> None:
    code = "import sys; import quantkit.pipeline; print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "False"
