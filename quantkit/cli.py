"""The command line: parse, call, print. Everything heavy is imported inside the commands."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from quantkit.errors import EXIT_DONE, EXIT_GATE_FAILED, EXIT_INTERRUPTED, QuantkitError

RUNS = click.option(
    "--runs", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Where runs are kept."
)
JSON = click.option(
    "--json", "as_json", is_flag=True, help="One JSON object on standard output, all else on standard error."
)
ARTIFACT = click.argument("artifact", type=click.Path(path_type=Path, exists=True, file_okay=False))
RUN = click.argument("run", type=click.Path(path_type=Path, exists=True, file_okay=False))
STAGE_NAMES = ("plan", "quantize", "evaluate", "bench", "gate", "publish")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="quantkit")
def cli() -> None:
    """Make a large language model cheap to serve, and prove that it still works.

    Exit codes: 0 done, a variant passed; 2 recipe; 3 plan; 4 solve; 5 artifact; 6 tool; 7 no variant passed its
    gates; 8 publish; 130 interrupted (the same command continues).
    """


@cli.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@RUNS
@click.option(
    "--until", type=click.Choice(STAGE_NAMES), default="publish", show_default=True, help="The last stage to run."
)
@click.option("--dry-run", is_flag=True, help="Check everything, print the plan, write nothing.")
@JSON
def quantize(recipe: Path, runs: Path, until: str, dry_run: bool, as_json: bool) -> int:
    """Run RECIPE: plan, quantize, evaluate, bench, gate, publish. The same command continues an interrupted run."""
    from quantkit import pipeline
    from quantkit.recipe import load

    if dry_run:
        return _show_plan(recipe, runs, as_json)
    verdict = pipeline.quantize(recipe, runs, until)
    folder = runs / load(recipe).name
    if verdict is None:
        _print({"run": str(folder), "until": until}, f"done until {until}: {folder}", as_json)
        return EXIT_DONE
    return _show_verdict(folder, verdict, as_json)


@cli.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@RUNS
@JSON
def plan(recipe: Path, runs: Path, as_json: bool) -> int:
    """Print what RECIPE would make, or everything that speaks against it. No weight is read."""
    return _show_plan(recipe, runs, as_json)


@cli.command()
@ARTIFACT
@click.option("--suite", required=True, help="A name of the folder evals/, or the path of such a file.")
@click.option(
    "--baseline", type=click.Path(path_type=Path, exists=True, file_okay=False), help="A model folder to compare with."
)
@click.option("--limit", type=click.IntRange(1), help="Items, at most.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("scores"), show_default=True, help="Where the scores go."
)
@JSON
def evaluate(artifact: Path, suite: str, baseline: Path | None, limit: int | None, out: Path, as_json: bool) -> int:
    """Score ARTIFACT (and a baseline, with equal settings) on one suite."""
    from quantkit import alone

    scores = alone.evaluate(artifact, suite, baseline, limit, out)
    rows = [(s.variant, name, t.metric, t.value, t.stderr, t.n) for s in scores for name, t in s.tasks.items()]
    text = _table(rows, ("model", "task", "metric", "value", "stderr", "n"))
    _print({s.variant: s.model_dump(mode="json") for s in scores}, text, as_json)
    return EXIT_DONE


@cli.command()
@ARTIFACT
@click.option("--target", default="cpu", show_default=True, help="A serving target of quantkit/plan/targets.yaml.")
@click.option("--port", type=int, help="A free one where not given.")
@click.option("--max-model-len", type=click.IntRange(16), default=2048, show_default=True)
def serve(artifact: Path, target: str, port: int | None, max_model_len: int) -> int:
    """Serve ARTIFACT on vLLM, on loopback, in the foreground, until interrupted."""
    from quantkit import alone

    with alone.endpoint(artifact, target, port, max_model_len) as endpoint:
        click.echo(f"serving {artifact} at {endpoint.url}/v1, model name {endpoint.model}; Ctrl-C ends it", err=True)
        signal.pause()
    return EXIT_DONE


@cli.command()
@ARTIFACT
@click.option("--baseline", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True)
@click.option("--target", default="cpu", show_default=True)
@click.option("--concurrency", type=click.IntRange(1), multiple=True, default=(1, 8), show_default=True)
@click.option("--pairs", type=click.IntRange(3), default=3, show_default=True)
@click.option(
    "--min-ratio", type=float, default=1.0, show_default=True, help="Throughput over the baseline's, at least."
)
@JSON
def bench(
    artifact: Path,
    baseline: Path,
    target: str,
    concurrency: tuple[int, ...],
    pairs: int,
    min_ratio: float,
    as_json: bool,
) -> int:
    """Load ARTIFACT and a baseline on vLLM, pair by pair, and judge the ratio."""
    from quantkit import alone

    timings = alone.bench(artifact, baseline, target, concurrency, pairs, min_ratio)
    rows = [(r.concurrency, r.ratio, r.low, r.high, r.min_ratio, r.verdict) for r in timings.regimes]
    text = _table(rows, ("concurrency", "ratio", "low", "high", "at least", "verdict"))
    _print(timings.model_dump(mode="json"), text, as_json)
    return EXIT_DONE if all(r.verdict == "pass" for r in timings.regimes) else EXIT_GATE_FAILED


@cli.command()
@RUN
@JSON
def gate(run: Path, as_json: bool) -> int:
    """Judge RUN again from its stored records; nothing is measured anew."""
    from quantkit import pipeline

    verdict = pipeline.judge(run)
    pipeline.write_report(run)
    return _show_verdict(run, verdict, as_json)


@cli.command()
@RUN
@click.option("--open", "show", is_flag=True, help="Open report.html in the browser.")
def report(run: Path, show: bool) -> int:
    """Write report.html, report.md and junit.xml of RUN from its stored records."""
    from quantkit import pipeline

    pipeline.write_report(run)
    click.echo(run / "report.html")
    if show:
        click.launch(str(run / "report.html"))
    return EXIT_DONE


@cli.command()
@RUN
@JSON
def publish(run: Path, as_json: bool) -> int:
    """Register the variant that RUN chose, with its evidence; the alias moves last."""
    from quantkit import pipeline

    done = pipeline.publish(run)
    _print(done, "\n".join(f"{key}: {value}" for key, value in done.items()), as_json)
    return EXIT_DONE


@cli.command()
@click.argument("target")
@click.option("--uri", help="MLflow tracking URI, where TARGET is models:/NAME@ALIAS.")
@JSON
def verify(target: str, uri: str | None, as_json: bool) -> int:
    """Check every digest of an artifact folder, or of a registered model (models:/NAME@ALIAS)."""
    from quantkit.publish.verify import verify as check

    artifact = check(target, uri)
    text = f"{target}: {len(artifact.files)} files of variant {artifact.variant!r} are as they were made"
    _print(artifact.model_dump(mode="json"), text, as_json)
    return EXIT_DONE


@cli.group()
def env() -> None:
    """The tool environments: other people's tools, each in its own locked virtual environment."""


@env.command("list")
def env_list() -> int:
    """Name them."""
    from quantkit.environments import build

    click.echo("\n".join(build.names()))
    return EXIT_DONE


@env.command("sync")
@click.argument("name")
def env_sync(name: str) -> int:
    """Build environment NAME from its lock, once."""
    from quantkit.environments import build

    click.echo(build.sync(name))
    return EXIT_DONE


@env.command("doctor")
@JSON
def env_doctor(as_json: bool) -> int:
    """Say which are built, and what the others want."""
    from quantkit.environments import build

    rows = build.doctor()
    _print({"environments": rows}, _table([list(row.values()) for row in rows], tuple(rows[0])), as_json)
    return EXIT_DONE


def _show_plan(recipe: Path, runs: Path, as_json: bool) -> int:
    from quantkit import pipeline

    try:
        ready = pipeline.prepare(recipe, runs)
    except QuantkitError as error:
        if as_json:
            print(json.dumps({"faults": [vars(fault) for fault in error.faults]}))
        raise
    plan = ready.plan
    rows: list[Any] = [("source", plan.source_bytes / 1e6, "", "yes", "")]
    rows += [
        (v.name, v.bytes / 1e6, f"{v.method} -> {v.format}", "yes" if v.servable else "no", v.why_not)
        for v in plan.variants
    ]
    text = _table(rows, ("variant", "MB", "made as", f"served on {plan.target}", "why not"))
    text += f"\n\nsource              {ready.index.origin}"
    if ready.index.quantized_origin:
        text += f"\n                    which was quantized before: {ready.index.quantized_origin}"
    text += f"\npeak memory         about {plan.peak_bytes / 1e9:.2f} GB to quantize"
    text += f"\ndisk                about {plan.disk_bytes / 1e9:.2f} GB"
    text += f"\ncalibration         {plan.calibration_tokens:,} tokens"
    text += f"\nKV cache            {plan.kv_bytes_per_token:,} bytes a token"
    weights = {"source": plan.source_bytes, **{v.name: v.bytes for v in plan.variants}}
    summary = {"faults": [], "weights_bytes": weights, "kv_bytes_per_token": plan.kv_bytes_per_token}
    _print(
        summary | {"plan": plan.model_dump(mode="json", exclude={"variants": {"__all__": {"modules"}}})}, text, as_json
    )
    return EXIT_DONE


def _show_verdict(run: Path, verdict: Any, as_json: bool) -> int:
    from quantkit.report.table import table

    text = table(run)
    chosen = f"chosen: {verdict.chosen}" if verdict.chosen else "chosen: none; no variant passed every gate"
    _print(
        verdict.model_dump(mode="json") | {"run": str(run)},
        f"{text}\n\n{chosen}\nreport: {run / 'report.html'}",
        as_json,
    )
    return EXIT_DONE if verdict.chosen else EXIT_GATE_FAILED


def _table(rows: list[Any], headers: tuple[str, ...]) -> str:
    from tabulate import tabulate

    return tabulate(rows, headers=headers, floatfmt=".4g")


def _print(value: Any, text: str, as_json: bool) -> None:
    print(json.dumps(value) if as_json else text)


def _ended(call: Callable[[], Any]) -> int:
    """The exit code of a command; a refusal is printed fault by fault."""
    try:
        return int(call() or EXIT_DONE)
    except QuantkitError as error:
        for fault in error.faults:
            click.echo(f"quantkit: {fault}", err=True)
        return error.exit_code
    except (KeyboardInterrupt, click.exceptions.Abort):
        click.echo("quantkit: interrupted; the same command continues the run", err=True)
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code


def _interrupt(*_: object) -> None:
    # Raised here, not sent as SIGINT: a shell starts its background commands with SIGINT ignored.
    raise KeyboardInterrupt


def main() -> None:
    """Entry point. SIGTERM ends a command as Ctrl-C does, so that servers and locks are let go."""
    signal.signal(signal.SIGTERM, _interrupt)
    if "--json" in sys.argv:
        # Libraries and child processes that print get standard error, so that standard output stays one object.
        sys.stdout = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
    sys.exit(_ended(lambda: cli.main(standalone_mode=False)))
