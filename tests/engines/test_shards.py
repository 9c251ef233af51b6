"""Laws of the passthrough: equal to the one pass where both apply, byte copies elsewhere, kills cost one shard."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.index import read_index
from quantkit.checkpoint.manifest import verify_manifest
from quantkit.engines import shards
from quantkit.engines.codes import dense
from quantkit.engines.shards import quantize, quantize_rows
from quantkit.errors import SolveError
from quantkit.pack import FORMATS
from quantkit.plan import anymodel
from quantkit.records import Index, Plan, VariantPlan
from quantkit.solve.rtn import rtn

SHARDS = 3
# More rows than a piece has, and a number of them that no piece ends at.
LINEARS = {"q_proj": (328, 64), "experts.0.up_proj": (64, 328), "out.fc": (40, 96)}


def make_model(folder: Path) -> Path:
    """Three shards of an architecture that nobody knows: linears, a router, a convolution, odd sizes, integers."""
    random = torch.Generator().manual_seed(1)
    weight_map = {}
    for shard in range(SHARDS):
        tensors: dict[str, torch.Tensor] = {
            f"model.layers.{shard}.{name}.weight": torch.randn(shape, generator=random).bfloat16()
            for name, shape in LINEARS.items()
        }
        tensors |= {
            f"model.layers.{shard}.mlp.gate.weight": torch.randn(4, 64, generator=random).bfloat16(),
            f"model.layers.{shard}.conv.weight": torch.randn(3, 1, 3, generator=random).half(),
            f"model.layers.{shard}.norm.weight": torch.randn(7, generator=random),
            f"model.layers.{shard}.counter": torch.arange(5),
            f"model.layers.{shard}.odd": torch.ones(3, dtype=torch.bool),
        }
        if shard == 0:
            tensors["model.embed_tokens.weight"] = torch.randn(100, 64, generator=random).bfloat16()
        file = f"part-{shard}.safetensors"
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "novel"}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def variant(index: Index, name: str, method: str, format: str = "compressed-tensors", **changes: Any) -> VariantPlan:
    modules = anymodel.linears(index.tensors)
    fields = {
        "name": name, "method": method, "format": format, "bits": 8, "group_size": 0, "symmetric": True,
        "rounding": "gptq", "damping": 0.01, "modules": modules, "ignored": anymodel.kept(index.tensors, modules),
        "bytes": 0, "servable": True,
    }  # fmt: skip
    return VariantPlan(**(fields | changes))


def every_variant(index: Index) -> tuple[VariantPlan, ...]:
    rtn: dict[str, Any] = {"bits": 4, "group_size": 8}
    return (
        variant(index, "fp8", "fp8"),
        variant(index, "block", "fp8", scheme="block"),
        variant(index, "int8", "int8"),
        variant(index, "rtn", "rtn", symmetric=False, **rtn),
        variant(index, "rtn8", "rtn", **(rtn | {"bits": 8, "group_size": -1})),
        variant(index, "awq", "rtn", "awq", symmetric=False, **rtn),
        variant(index, "gptq", "rtn", "gptq", **rtn),
    )


def run(index: Index, variants: tuple[VariantPlan, ...], out: Path) -> list[dict[str, Any]]:
    plan = Plan(
        family="novel", engine="shards", variants=variants, source_bytes=0, peak_bytes=0, disk_bytes=0,
        calibration_tokens=0, kv_bytes_per_token=0, target="cpu",
    )  # fmt: skip
    quantize(index, plan, out / "artifacts", out / "ledger.jsonl", "digest")
    return [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]


def digests(out: Path) -> dict[str, str]:
    files = (path for path in out.rglob("*") if path.is_file())
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("piece", [128 * 64 * 2, 2 << 20])
def test_every_linear_is_what_its_whole_weight_gives_and_the_rest_is_copied(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_PIECE", piece)
    index = read_index(make_model(tmp_path / "model"))
    source = tensors_of(index.root)
    lines = run(index, every_variant(index), tmp_path / "out")
    assert len(lines) == len(every_variant(index)) * SHARDS * len(LINEARS)
    assert not (tmp_path / "out" / "artifacts" / ".work").exists()
    for plan in every_variant(index):
        folder = tmp_path / "out" / "artifacts" / plan.name
        verify_manifest(folder)
        assert {path.name for path in folder.glob("*.safetensors")} == {f"part-{n}.safetensors" for n in range(SHARDS)}
        made = tensors_of(folder)
        for module in plan.modules:
            weight_OI = source[f"{module.name}.weight"]
            expected = FORMATS[plan.format].pack(quantize_rows(plan, weight_OI))
            for end, tensor in expected.items():
                found = made.pop(f"{module.name}.{end}")
                assert found.dtype == tensor.dtype and torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
            lost = (weight_OI.double() - dense(quantize_rows(plan, weight_OI)).double()).square().sum()
            (line,) = (x for x in lines if x["variant"] == plan.name and x["module"] == module.name)
            assert line["error"] == line["rtn_error"] == pytest.approx(float(lost / weight_OI.double().square().sum()))
            assert line["tokens"] == 0 and line["asked"] == line["used"] == plan.method
        kept = {name for name in source if name.removesuffix(".weight") not in {m.name for m in plan.modules}}
        assert set(made) == kept
        for name in kept:
            assert made[name].dtype == source[name].dtype and torch.equal(made[name], source[name])
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        if plan.format == "compressed-tensors":
            assert set(config["ignore"]) == {"lm_head", *plan.ignored}
        assert "model.layers.0.mlp.gate" in json.dumps(config) or plan.format == "gptq"


def test_plain_rounding_of_rows_is_that_of_the_one_pass() -> None:
    weight_OI = torch.randn(16, 64).bfloat16()
    plan = VariantPlan(
        name="v", method="rtn", format="compressed-tensors", bits=4, group_size=32, symmetric=False, rounding="gptq",
        damping=0.01, modules=(), ignored=(), bytes=0, servable=True,
    )  # fmt: skip
    made = quantize_rows(plan, weight_OI)
    codes, grid = rtn(weight_OI.float(), 32, symmetric=False, dtype=torch.bfloat16)
    assert torch.equal(made.codes_OI, codes) and torch.equal(made.scale_OG.float(), grid.scale_OG)


def test_only_some_variants_may_keep_a_linear(tmp_path: Path) -> None:
    index = read_index(make_model(tmp_path / "model"))
    whole, less = every_variant(index)[0], every_variant(index)[2]
    kept = less.modules[0].name
    less = less.model_copy(update={"modules": less.modules[1:], "ignored": (*less.ignored, kept)})
    run(index, (whole, less), tmp_path / "out")
    name = f"{kept}.weight"
    assert tensors_of(tmp_path / "out" / "artifacts" / "fp8")[name].dtype == torch.float8_e4m3fn
    assert torch.equal(tensors_of(tmp_path / "out" / "artifacts" / "int8")[name], tensors_of(index.root)[name])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path, value: float) -> None:
    folder = make_model(tmp_path / "model")
    tensors = load_file(folder / "part-1.safetensors")
    tensors["model.layers.1.out.fc.weight"][3, 5] = value
    save_file(tensors, folder / "part-1.safetensors")
    index = read_index(folder)
    for plan in every_variant(index)[:4]:
        with pytest.raises(SolveError, match=r"model\.layers\.1\.out\.fc"):
            run(index, (plan,), tmp_path / plan.name)
        assert not (tmp_path / plan.name / "artifacts" / plan.name / "part-1.safetensors").exists()


_KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {here!r})
import test_shards as laws
from quantkit.checkpoint.index import read_index
from quantkit.checkpoint.stream import Draft
from quantkit.engines import shards
where, original = {where}, {where}.{step}
calls = iter(range(1000))
def deadly(*arguments):
    if next(calls) == {call}:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments)
where.{step} = deadly
index = read_index(Path({model!r}))
laws.run(index, laws.every_variant(index)[:2], Path({out!r}))
"""


@pytest.mark.parametrize(
    ("where", "step", "call", "finished"),
    [
        ("shards", "_commit", 0, 0),
        ("shards", "_commit", 2, 2),
        ("Draft", "put", 10, 0),
        ("Draft", "put", 30, 1),
        ("shards", "seal", 1, 3),
    ],
)
def test_killed_anywhere_and_run_again_gives_the_same_bytes(
    where: str, step: str, call: int, finished: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = read_index(make_model(tmp_path / "model"))
    plans = every_variant(index)[:2]
    run(index, plans, tmp_path / "whole")
    out = tmp_path / "killed"
    script = _KILLED.format(
        here=str(Path(__file__).parent), where=where, step=step, call=call, model=str(index.root), out=str(out)
    )
    died = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert len(list((out / "artifacts" / ".work").glob("shard-*.json"))) == finished
    ran: list[str] = []
    original = shards._one_shard

    def counted(*arguments: Any) -> Any:
        ran.append(arguments[2])
        return original(*arguments)

    monkeypatch.setattr(shards, "_one_shard", counted)
    run(index, plans, out)
    assert ran == [f"part-{number}.safetensors" for number in range(finished, SHARDS)]
    assert digests(out) == digests(tmp_path / "whole")


def test_a_finished_run_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = read_index(make_model(tmp_path / "model"))
    plans = every_variant(index)[:2]
    run(index, plans, tmp_path / "out")
    monkeypatch.setattr(shards, "_one_shard", lambda *_: pytest.fail("made again"))
    run(index, plans, tmp_path / "out")
