"""Text sets: calibration/*.yaml. Each set is divided once into a part for calibration and a part held out for judging.

A document belongs to a part by the sha256 of its name (python-docs) or of its text (files), so the parts never share
a document, whatever the order, the seed or the rest of the set. No torch here.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from quantkit import paths
from quantkit.errors import Fault, PlanError

Part = Literal["calibration", "held_out"]

_HEADING = re.compile(r"^ ?= [^=\n]+ = ?$", re.MULTILINE)
_PARAGRAPH = re.compile(r"\n\s*\n")
_REPEATED = 60
"""Characters from which a paragraph that stands twice is a copy, not a turn of phrase."""


class TextSet(BaseModel):
    """One file of calibration/."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    kind: Literal["python-docs", "jsonl", "text"]
    """python-docs: the language reference inside Python itself. jsonl: a document a line. text: see `_split_text`."""
    path: str | None = None
    """Of a jsonl or text file (.gz is unpacked): absolute, or relative to the folder of the YAML."""
    field: str = "text"
    """jsonl: the key of the text; a list of chat messages is joined."""
    licence: str
    held_out: Annotated[float, Field(ge=0, le=1)]
    """Share of the documents that calibration never sees."""

    @model_validator(mode="after")
    def _path(self) -> Self:
        if (self.kind == "python-docs") != (self.path is None):
            raise ValueError("path belongs to the kinds jsonl and text, which need it")
        return self


def documents(set_name: str, part: Part) -> list[str]:
    """The documents of one part, without empty ones and copies, in an order that never changes.

    Args:    set_name: a name in calibration/, or the path of such a YAML.
    Raises:  PlanError with every fault of the set.
    """
    text_set, file, faults = _open(set_name)
    if text_set is None or faults:
        raise PlanError(*faults)
    chosen = []
    for key, text in _documents(text_set, file):
        held_out = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") < text_set.held_out * 2**64
        if held_out == (part == "held_out"):
            chosen.append(text)
    if not chosen:
        what = f"text set {text_set.name} has no {part} document (held_out: {text_set.held_out:g})"
        raise PlanError(Fault(what, set_name, "change held_out in its YAML, or use a set with more documents"))
    return chosen


def check_set(name: str) -> list[Fault]:
    """What is wrong with a set, without reading its documents."""
    return _open(name)[2]


def _open(name: str) -> tuple[TextSet | None, Path, list[Fault]]:
    """The set, the text file that it names (python-docs: the YAML itself) and the faults of both."""
    path = paths.find_data("calibration", name)
    if path is None:
        do = f"use one of {', '.join(paths.known_data('calibration'))}, or the path of a YAML like those"
        return None, Path(name), [Fault(f"no text set {name}", "calibration.set", do)]
    try:
        text_set = TextSet.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError) as error:
        details = error.errors() if isinstance(error, ValidationError) else [{"loc": (), "msg": str(error)}]
        do = "correct it; calibration/README.md lists the keys"
        wheres = [": ".join([str(path), ".".join(map(str, detail["loc"]))]) for detail in details]
        return None, path, [Fault(str(d["msg"]), where, do) for d, where in zip(details, wheres, strict=True)]
    if text_set.path is None:
        return text_set, path, []
    file = (path.parent / Path(text_set.path).expanduser()).resolve()
    faults = []
    if not file.is_file():
        faults.append(Fault(f"no file {file}", f"{path}: path", "put the file there, or correct the path"))
    suites = {suite.partition("-")[0] for suite in paths.known_data("evals")} - {"perplexity"}
    benchmarks = sorted(suites & set(re.split(r"[^a-z0-9]+", "/".join(file.parts[-3:]).lower())))
    if benchmarks:
        do = "calibrate on something else: a model must not see what it is judged on"
        faults.append(Fault(f"this file belongs to the suite {', '.join(benchmarks)}", f"{path}: path", do))
    return text_set, file, faults


def _documents(text_set: TextSet, file: Path) -> Iterable[tuple[str, str]]:
    """(what decides the part, text) of each document."""
    if text_set.kind == "python-docs":
        return _python_docs()
    try:
        raw = file.read_bytes()
        text = (gzip.decompress(raw) if file.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        do = "give a UTF-8 text file"
        raise PlanError(Fault(f"not readable as text: {error}", str(file), do)) from None
    texts = _split_text(text) if text_set.kind == "text" else _split_lines(text, text_set.field, file)
    unique = dict.fromkeys(text.strip() for text in texts)
    return [(text, text) for text in unique if text]


def _python_docs() -> list[tuple[str, str]]:
    """Python's help topics. Many repeat paragraphs of others; each paragraph stays in the first topic that has it."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    seen: set[str] = set()
    kept = []
    for name in sorted(topics):
        paragraphs = []
        for paragraph in _PARAGRAPH.split(topics[name]):
            plain = " ".join(paragraph.split())
            if len(plain) < _REPEATED or plain not in seen:
                paragraphs.append(paragraph)
            seen.add(plain)
        kept.append((name, "\n\n".join(paragraphs).strip()))
    return [(name, text) for name, text in kept if len(text) > 4 * _REPEATED]


def _split_text(text: str) -> list[str]:
    """A document from each top-level heading ' = Title = ' (WikiText) to the next; no heading: one document."""
    starts = [match.start() for match in _HEADING.finditer(text)]
    ends = [*starts, len(text)]
    return [text[start:end] for start, end in zip([0, *starts], ends, strict=True)]


def _split_lines(text: str, field: str, file: Path) -> list[str]:
    texts, wrong = [], []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            texts.append(_plain(json.loads(line)[field]))
        except (ValueError, KeyError, TypeError):
            wrong.append(number)
    if wrong:
        shown = ", ".join(map(str, wrong[:5]))
        what = f"{len(wrong)} lines are no JSON object with a text or chat under {field!r}: {shown}"
        raise PlanError(Fault(what, str(file), "correct the lines, or `field` in the set's YAML"))
    return texts


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "\n\n".join(str(message["content"]) for message in value)
