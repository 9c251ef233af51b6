"""The held-out part shares nothing with the calibration part, whatever the set; bad sets are refused in words."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
import yaml

from quantkit import paths, texts
from quantkit.errors import PlanError


def write_set(folder: Path, lines: str, **changes: object) -> str:
    """A set over a file with these contents; returns the path of its YAML."""
    (folder / "lines.jsonl").write_text(lines)
    keys = {"name": "mine", "kind": "jsonl", "path": "lines.jsonl", "licence": "none", "held_out": 0.5} | changes
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in keys.items() if value is not None}))
    return str(file)


def jsonl(documents: list[str]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in documents)


def paragraphs(documents: list[str]) -> set[str]:
    return {" ".join(part.split()) for text in documents for part in re.split(r"\n\s*\n", text)}


def test_python_docs_shares_no_paragraph_between_its_parts() -> None:
    ours, kept = (texts.documents("python-docs", part) for part in ("calibration", "held_out"))
    assert not set(ours) & set(kept)
    assert not {text for text in paragraphs(ours) & paragraphs(kept) if len(text) >= 60}
    # Enough for the quickstart (64 windows of 512 tokens, under 4 characters each) and for 32 windows of judging.
    assert sum(map(len, ours)) > 4 * 64 * 512
    assert sum(map(len, kept)) > 4 * 32 * 512


@pytest.mark.parametrize("share", [0, 0.2, 0.5, 1])
def test_the_parts_divide_the_documents_by_the_share(tmp_path: Path, share: float) -> None:
    wanted = [f"document {number}" for number in range(400)]
    name = write_set(tmp_path, jsonl(wanted), held_out=share)
    sizes = []
    found: list[str] = []
    for part in ("calibration", "held_out"):
        try:
            found += texts.documents(name, part)
        except PlanError as error:
            assert "has no" in str(error)
        sizes.append(len(found))
    assert sorted(found) == sorted(wanted)
    assert abs((400 - sizes[0]) / 400 - share) < 0.1


def test_a_document_stays_in_its_part_when_others_come_and_go(tmp_path: Path) -> None:
    first = write_set(tmp_path, jsonl([f"document {number}" for number in range(50)]))
    before = set(texts.documents(first, "held_out"))
    second = write_set(tmp_path, jsonl([f"document {number}" for number in range(99, -1, -1)]))
    assert {text for text in texts.documents(second, "held_out") if int(text.split()[1]) < 50} == before


def test_empty_documents_and_copies_are_dropped(tmp_path: Path) -> None:
    name = write_set(tmp_path, jsonl(["one", "", "  \n", "one", "two"]), held_out=0)
    assert texts.documents(name, "calibration") == ["one", "two"]


def test_chat_messages_become_one_text(tmp_path: Path) -> None:
    line = json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "you"}]})
    name = write_set(tmp_path, line, field="messages", held_out=0)
    assert texts.documents(name, "calibration") == ["hi\n\nyou"]


def test_wikitext_is_divided_at_its_top_headings_only(tmp_path: Path) -> None:
    text = " \n = One = \n \n a \n = = Part = = \n b \n = Two = \n c \n"
    (tmp_path / "wiki.txt.gz").write_bytes(gzip.compress(text.encode()))
    name = write_set(tmp_path, "", kind="text", path="wiki.txt.gz", held_out=0)
    titles = [document.split("\n")[0].strip() for document in texts.documents(name, "calibration")]
    assert titles == ["= One =", "= Two ="]


def test_bad_lines_are_counted_and_named(tmp_path: Path) -> None:
    name = write_set(tmp_path, '{"text": "good"}\nnot json\n{"other": 1}\n')
    with pytest.raises(PlanError, match=r"2 lines .* 2, 3"):
        texts.documents(name, "calibration")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "absent.jsonl"}, "no file .*absent"),
        ({"held_out": 2}, "less than or equal to 1"),
        ({"path": None}, "path belongs"),
        ({"kind": "csv"}, "python-docs"),
        ({"colour": "red"}, "Extra"),
        ({"path": "humaneval/HumanEval.jsonl"}, "suite humaneval"),
    ],
)
def test_a_bad_set_is_one_fault_that_says_what_and_where(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    (tmp_path / "humaneval").mkdir()
    (tmp_path / "humaneval" / "HumanEval.jsonl").write_text(jsonl(["def f(): ..."]))
    (fault,) = texts.check_set(write_set(tmp_path, jsonl(["a"]), **change))
    assert re.search(message, fault.what)
    assert "mine.yaml" in fault.where


def test_an_unknown_set_lists_the_known_ones() -> None:
    (fault,) = texts.check_set("nowhere")
    assert "python-docs" in fault.do


def test_every_set_that_comes_along_is_sound_or_only_lacks_its_file() -> None:
    for name in paths.known_data("calibration"):
        assert all(fault.what.startswith("no file") for fault in texts.check_set(name))
