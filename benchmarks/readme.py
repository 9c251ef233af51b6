"""Write the quickstart's table into README.md, from the records of runs/quickstart."""

from __future__ import annotations

import json
from pathlib import Path

from quantkit.records import Run
from quantkit.report.table import table

ROOT = Path(__file__).parents[1]
BEGIN = "<!-- quickstart table: `make readme` writes it from runs/quickstart -->\n"
END = "<!-- end of the table -->"


def main() -> None:
    run = ROOT / "runs" / "quickstart"
    record, verdict = Run.read(run / "run.json"), json.loads((run / "verdict.json").read_text(encoding="utf-8"))
    minutes = {name: f"{stage.seconds / 60:.1f}" for name, stage in record.stages.items() if stage.seconds >= 3}
    spent = ", ".join(f"{name} {value}" for name, value in minutes.items())
    machine = f"{record.machine['cpu']}, {record.machine['cores']} cores"
    text = f"\n{table(run, markdown=True)}\n\nChosen: {verdict['chosen']}. {machine}; minutes: {spent}.\n\n"
    readme = ROOT / "README.md"
    head, rest = readme.read_text(encoding="utf-8").split(BEGIN)
    readme.write_text(head + BEGIN + text + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
