"""Laws of every family in the table: folds are exact, every method runs, and what comes out loads near its source."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quantkit.checkpoint.index import read_index
from quantkit.checkpoint.manifest import verify_manifest
from quantkit.checkpoint.read import Weights
from quantkit.engines import variant as solving
from quantkit.families import FAMILIES, family_of
from tests.conftest import TinyFamily
from tests.engines.test_onepass import every_variant, logits, run, tensors_of, variant


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_folding_without_rounding_changes_no_logit(
    kind: str, kv_heads: int, tmp_path: Path, tiny_family: TinyFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches every wrong fold: scales far from 1, stored as float32, nothing rounded."""
    index = read_index(tiny_family(tmp_path / "model", kind, "float32", num_key_value_heads=kv_heads))
    plan = variant(index, "awq", "awq", "awq", False)
    family = family_of(index.config)
    random = torch.Generator().manual_seed(4)

    def wild(weights: Any, gram: Any, mean: Any, channel_I: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.exp(torch.randn(int(channel_I.max()) + 1, generator=random))

    monkeypatch.setattr(solving, "channel_scale", wild)
    with Weights(index) as weights:
        tensors = {name: weights.get(name).clone() for name in index.tensors}
    for block in range(family.blocks(index.config)):
        prefix = family.prefix(block)
        source = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        linears = {name: source[f"{name}.weight"] for group in family.inputs for name in group}
        columns = {group[0]: linears[group[0]].shape[1] for group in family.inputs}
        known = {n: solving.Statistics(torch.eye(c), torch.ones(c), torch.ones(c), 1) for n, c in columns.items()}
        folded = solving._fold(plan, list(family.folds), index.config, source, linears, known)
        changed = {f"{name}.weight": weight for name, weight in folded.weights.items()} | folded.changed
        assert {f"{fold.before}.weight" for fold in family.folds} <= set(changed)
        for name, tensor in changed.items():
            assert not torch.equal(tensor, source[name])
            tensors[prefix + name] = tensor
    (tmp_path / "folded").mkdir()
    shutil.copy(index.root / "config.json", tmp_path / "folded")
    save_file(tensors, tmp_path / "folded" / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(logits(tmp_path / "folded"), logits(index.root), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_variant_loads_near_its_source_and_is_no_worse_than_plain(
    kind: str, tmp_path: Path, tiny_family: TinyFamily
) -> None:
    index = read_index(tiny_family(tmp_path / "model", kind))
    family = family_of(index.config)
    linears = family.linears(index.config, index.tensors)
    lines = run(index, every_variant(index), tmp_path / "out")
    assert len(lines) == len(every_variant(index)) * len(linears)
    assert all(line["error"] <= 1.01 * line["rtn_error"] for line in lines)
    assert all(line["tokens"] == 256 for line in lines if not line["module"].endswith(family.pooled))
    for name in ("awq", "gptq"):
        own = [line for line in lines if line["variant"] == name]
        assert sum(line["used"] == name for line in own) >= 0.9 * len(own)
        assert sum(line["error"] for line in own) < 0.8 * sum(line["rtn_error"] for line in own)
    source = logits(index.root)
    divergence = {}
    for plan in every_variant(index):
        folder = tmp_path / "out" / "artifacts" / plan.name
        assert verify_manifest(folder).variant == plan.name
        found = logits(folder)
        # The median token: where a router changes its mind, one token's divergence is chance, and outweighs the mean.
        divergence[plan.name] = float((source.exp() * (source - found)).sum(-1).median())
    assert divergence["int8"] < divergence["fp8"] < divergence["awq"] < divergence["rtn"]
    assert divergence["gptq8"] < divergence["rtn8"] < divergence["int8"]
    assert max(divergence["static"], divergence["block"]) < divergence["awq"]
    assert not (tmp_path / "out" / "artifacts" / ".work").exists()


@pytest.mark.parametrize("kind", [kind for kind, family in FAMILIES.items() if family.experts])
def test_experts_that_no_token_reached_come_out_like_their_siblings(
    kind: str, tmp_path: Path, tiny_family: TinyFamily
) -> None:
    index = read_index(tiny_family(tmp_path / "model", kind))
    family = family_of(index.config)
    assert family.experts
    plans = every_variant(index)
    lines = run(index, plans, tmp_path / "out", tokens=torch.full((10, 8), 5))
    downs = [line for line in lines if line["module"].endswith(f".{family.experts.parts[2]}")]
    assert {line["tokens"] for line in downs} == {0, 80}
    for plan in plans:
        folder = tmp_path / "out" / "artifacts" / plan.name
        assert torch.isfinite(logits(folder)).all()
        by_expert: dict[str, set[tuple[str, torch.dtype, torch.Size]]] = {}
        for name, tensor in tensors_of(folder).items():
            head, found, tail = name.partition(".experts.")
            if found:
                number, _, rest = tail.partition(".")
                by_expert.setdefault(number, set()).add((f"{head}.{rest}", tensor.dtype, tensor.shape))
        assert len(by_expert) == 4 and all(own == by_expert["0"] for own in by_expert.values())


@pytest.mark.parametrize("kind", [kind for kind, family in FAMILIES.items() if family.experts])
def test_routers_are_named_as_kept_and_change_only_where_their_norm_does(
    kind: str, tmp_path: Path, tiny_family: TinyFamily
) -> None:
    index = read_index(tiny_family(tmp_path / "model", kind))
    family = family_of(index.config)
    plans = (*every_variant(index)[:1], *every_variant(index)[2:4])
    run(index, plans, tmp_path / "out")
    routers = [family.prefix(block) + name for block in range(3) for name in family.routers]
    source = tensors_of(index.root)
    for plan, key in zip(plans, ("modules_to_not_convert", "dynamic", "ignore"), strict=True):
        folder = tmp_path / "out" / "artifacts" / plan.name
        kept = json.loads((folder / "config.json").read_text())["quantization_config"][key]
        made = tensors_of(folder)
        for name in routers:
            assert any(re.fullmatch(entry.removeprefix("-:"), name) for entry in kept)
            norm = f"{name.rpartition('.')[0].rpartition('.')[0]}.post_attention_layernorm.weight"
            same = torch.equal(made[f"{name}.weight"], source[f"{name}.weight"])
            assert same == torch.equal(made[norm], source[norm]) and (same or plan.method == "awq")
