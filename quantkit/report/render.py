"""report.html, report.md and junit.xml of a run folder, from its stored records alone."""

from __future__ import annotations

import json
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from quantkit.records import write_text
from quantkit.report import plots
from quantkit.report.escape import clean
from quantkit.report.escape import markdown as escaped
from quantkit.report.junit import junit
from quantkit.report.notes import headline, notes, outcome, stages
from quantkit.report.sections import sections
from quantkit.report.stored import Stored, read
from quantkit.report.table import cells, text_of


def write_report(run: Path) -> None:
    """Write the three files into the run folder, however far the run came."""
    stored = read(run)
    write_text(run / "report.md", markdown(stored))
    write_text(run / "junit.xml", junit(stored))
    write_text(run / "report.html", page(stored))


def page(stored: Stored) -> str:
    """One HTML file with everything in it: no script, nothing fetched."""
    environment = Environment(
        loader=PackageLoader("quantkit.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else clean(value),
    )
    headers, rows = cells(stored)
    return environment.get_template("report.html.j2").render(
        name=stored.name,
        headline=headline(stored),
        outcome=outcome(stored),
        chosen=stored.verdict.chosen if stored.verdict else None,
        notes=notes(stored),
        headers=headers,
        rows=rows,
        # matplotlib's own output, in which it has escaped every name.
        plots=[
            (title, Markup(svg))  # noqa: S704 - see above
            for title, svg in (
                ("Quality against size", plots.quality_against_size(stored)),
                ("Throughput against the source", plots.throughput_ratios(stored)),
            )
            if svg
        ],
        verdicts=list(stored.verdict.variants.items()) if stored.verdict else [],
        sections=[(title, head, body) for title, head, body in sections(stored) if body],
        facts=facts(stored),
        recipe=json.dumps(stored.run.recipe, indent=1, ensure_ascii=False) if stored.run else "",
    )


def markdown(stored: Stored) -> str:
    """The verdict, the table, the reasons, and what to know: what a CI job shows."""
    lines = [f"# {escaped(stored.name)}: {escaped(headline(stored))}", "", text_of(stored, markdown=True), ""]
    if stored.verdict:
        for name, verdict in stored.verdict.variants.items():
            lines += [f"**{escaped(name)}**: accuracy {verdict.accuracy}, throughput {verdict.throughput}", ""]
            lines += [*(f"- {escaped(line)}" for line in verdict.why), ""]
    said = notes(stored)
    if said:
        lines += ["## What to know", "", *(f"- {escaped(line)}" for line in said), ""]
    lines += ["## Made by", "", *(f"- {escaped(name)}: {escaped(value)}" for name, value in facts(stored)), ""]
    return "\n".join(lines)


def facts(stored: Stored) -> list[tuple[str, str]]:
    """Where the numbers come from: source, digests, machine, versions, servers, time."""
    found: list[tuple[str, str]] = []
    run = stored.run
    if run:
        found += [("source", run.origin), ("source quantized before", run.quantized_origin or "no")]
        found += [("recipe digest", run.recipe_digest), ("source digest", run.source_digest)]
        if run.calibration_digest:
            found.append(("calibration digest", run.calibration_digest))
        found.append(("machine", ", ".join(f"{key} {value}" for key, value in run.machine.items())))
        found.append(("versions", ", ".join(f"{key} {value}" for key, value in run.versions.items())))
    for name, timings in stored.timings.items():
        tools = ", ".join(f"{key} {value}" for key, value in timings.versions.items())
        kernel = timings.kernel or "not named by its log"
        found.append((f"served {name}", f"target {timings.target}, kernel {kernel}, {tools}"))
        found.append((f"flags {name}", " ".join(timings.flags) or "none"))
    for name, stage in stages(stored):
        found.append((f"stage {name}", f"{stage.state}, {stage.seconds:.1f} s"))
    return found
