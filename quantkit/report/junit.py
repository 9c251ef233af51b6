"""junit.xml: a case a gate, so that a CI server shows which one failed and why."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree  # written only, never read

from quantkit.records import VariantVerdict
from quantkit.report.escape import clean
from quantkit.report.notes import headline, stage
from quantkit.report.stored import Stored

Case = tuple[str, str, str, str]
"""class, name, kind ('' passed, 'failure', 'error', 'skipped', 'system-out'), message"""


def junit(stored: Stored) -> str:
    """Required gates that fail or decide nothing are failures; reported ones never are."""
    found = cases(stored)
    counts = {kind: sum(case[2] == kind for case in found) for kind in ("failure", "error", "skipped")}
    suite = ElementTree.Element(
        "testsuite",
        name=clean(f"quantkit {stored.name}"),
        tests=str(len(found)),
        failures=str(counts["failure"]),
        errors=str(counts["error"]),
        skipped=str(counts["skipped"]),
        time=f"{sum(stage.seconds for stage in stored.run.stages.values()) if stored.run else 0:.1f}",
    )
    for group, name, kind, message in found:
        case = ElementTree.SubElement(suite, "testcase", classname=clean(group), name=clean(name), time="0")
        if kind == "system-out":
            ElementTree.SubElement(case, kind).text = clean(message)
        elif kind:
            ElementTree.SubElement(case, kind, message=clean(message))
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=False) + "\n"


def cases(stored: Stored) -> list[Case]:
    found: list[Case] = []
    if stored.verdict is None:
        kind = "error" if stage(stored, "failed") else "skipped"
        found.append((stored.name, "verdict", kind, headline(stored)))
    for name in stored.variants:
        verdict = stored.verdict.variants.get(name) if stored.verdict else None
        for one in verdict.judgements if verdict else ():
            said = f"{one.outcome}: {one.why}"
            bad = one.required and one.outcome != "pass"
            kind = "failure" if bad else "system-out"
            found.append((f"{name}.accuracy", one.suite, kind, said))
        found += _throughput(stored, name, verdict)
    return found


def _throughput(stored: Stored, name: str, verdict: VariantVerdict | None) -> list[Case]:
    group = f"{name}.throughput"
    measured = [(short, regime) for key, short in stored.regimes().items() if (regime := stored.regime(name, key))]
    gate = stored.recipe.gates.throughput if stored.recipe and stored.recipe.gates else None
    if verdict and verdict.throughput in ("not servable", "not measured"):
        why = next((line for line in verdict.why if verdict.throughput in line), verdict.throughput)
        names = [f"concurrency {regime.concurrency}" for regime in gate.regimes] if gate else []
        return [(group, regime, "skipped", why) for regime in names or ["throughput"]]
    return [
        (
            group,
            f"concurrency {short.removeprefix('@')}",
            "system-out" if regime.verdict == "pass" else "failure",
            f"{regime.verdict}: {regime.why}",
        )
        for short, regime in measured
    ]
