"""What headers and config show to be wrong is said before work, all of it; the bytes are those of the shapes."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest

from quantkit.families import FAMILIES
from quantkit.plan import kernels, memory, preflight
from quantkit.plan.kernels import targets, why_not_served
from quantkit.recipe import Recipe
from quantkit.records import Index, Module, Plan, TensorInfo, VariantPlan

HIDDEN, INTERMEDIATE, LAYERS = 256, 384, 2


def an_index(columns_of_down: int = INTERMEDIATE) -> Index:
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
        "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (columns_of_down, HIDDEN),
        "mlp.up_proj": (columns_of_down, HIDDEN),
        "mlp.down_proj": (HIDDEN, columns_of_down),
    }
    tensors = {"model.embed_tokens.weight": (1000, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        tensors |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}
        tensors |= {f"model.layers.{layer}.input_layernorm.weight": (HIDDEN,)}
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    infos = {}
    for name, shape in tensors.items():
        size = 2
        for side in shape:
            size *= side
        infos[name] = TensorInfo(dtype="BF16", shape=shape, file="model.safetensors", bytes=size)
    return Index(root=Path("/nowhere"), config=config, tensors=infos, origin="test")


def faults_of(tmp_path: Path, index: Index, variants: dict[str, Any], **more: Any) -> list[str]:
    document = {"name": "t", "model": {"source": "x"}, "variants": variants, "calibration": {"length": 64}, **more}
    document.setdefault("serve", {"max_model_len": 512})
    recipe = Recipe.of(document)
    _, faults = preflight.make_plan(recipe, Path("t.yaml"), index, FAMILIES["llama"], tmp_path)
    return [str(fault) for fault in faults]


def test_a_sound_recipe_has_no_fault(tmp_path: Path) -> None:
    variants = {"awq": {"method": "awq", "group_size": 64}, "fp8": {"method": "fp8"}}
    assert faults_of(tmp_path, an_index(), variants) == []


def test_three_faults_of_three_kinds_are_one_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        free = 10

    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: Full)
    variants = {
        "awq": {"method": "awq", "group_size": 96},
        "gptq": {"method": "gptq", "group_size": 64, "ignore": ["*.nothing"]},
        "rtn": {"method": "rtn", "format": "awq", "group_size": 64},
    }
    text = "\n".join(faults_of(tmp_path, an_index(), variants))
    assert "256 input columns do not divide into groups of 96 (64 left over)" in text
    assert "'*.nothing' matches no linear" in text
    assert "GB of disk" in text


def test_a_group_that_does_not_divide_names_those_that_do(tmp_path: Path) -> None:
    (text, *_) = faults_of(tmp_path, an_index(columns_of_down=448), {"awq": {"method": "awq", "group_size": 128}})
    assert "down_proj and 1 more: 448 input columns" in text and "use 64 or 32" in text


@pytest.mark.parametrize("pattern", ["*.q_proj", "*.0.mlp.up_proj"])
def test_what_vllm_fuses_is_kept_whole_or_not_at_all(tmp_path: Path, pattern: str) -> None:
    variants = {"v": {"method": "gptq", "group_size": 64, "ignore": [pattern]}}
    assert "vLLM fuses" in "\n".join(faults_of(tmp_path, an_index(), variants))


def test_ignoring_everything_is_refused(tmp_path: Path) -> None:
    variants = {"v": {"method": "gptq", "group_size": 64, "ignore": ["*"]}}
    assert "nothing is left" in "\n".join(faults_of(tmp_path, an_index(), variants))


def test_lengths_beyond_the_model_are_refused(tmp_path: Path) -> None:
    text = "\n".join(faults_of(tmp_path, an_index(), {"v": {"method": "fp8"}}, serve={"max_model_len": 513}))
    assert "513 tokens, but the model has 512 positions" in text


def test_an_unknown_target_lists_the_known(tmp_path: Path) -> None:
    text = "\n".join(faults_of(tmp_path, an_index(), {"v": {"method": "fp8"}}, serve={"target": "tpu"}))
    assert "'tpu'" in text and all(name in text for name in targets())


def test_kv_bytes_of_llama_2_70b() -> None:
    config = {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192}
    assert memory.kv_bytes_per_token(config) == 327_680
    del config["num_key_value_heads"]
    assert memory.kv_bytes_per_token(config) == 2_621_440


def a_plan(method: str, rows: int = 64, columns: int = 64, **changes: Any) -> VariantPlan:
    fields = {
        "name": "v", "method": method, "format": "compressed-tensors", "bits": 8 if method in ("fp8", "int8") else 4,
        "group_size": 0 if method in ("fp8", "int8") else 128, "symmetric": True, "rounding": "gptq", "damping": 0.01,
        "modules": (Module(name="m", rows=rows, columns=columns),), "ignored": (), "bytes": 0, "servable": True,
    }  # fmt: skip
    return VariantPlan(**(fields | changes))


@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_bytes_of_an_awq_linear_are_those_of_its_tensors(group: int) -> None:
    rows, columns = 512, 1024
    groups = 1 if group == -1 else columns // group
    qweight, qzeros, scales = columns * (rows // 8) * 4, groups * (rows // 8) * 4, groups * rows * 2
    awq, gptq = (a_plan("rtn", rows, columns, format=format, group_size=group) for format in ("awq", "gptq"))
    assert memory.linear_bytes(awq.modules[0], awq) == qweight + qzeros + scales
    g_idx = columns * 4
    assert memory.linear_bytes(gptq.modules[0], gptq) == qweight + qzeros + scales + g_idx


@pytest.mark.parametrize("scheme", ["dynamic", "static", "block"])
@pytest.mark.parametrize("shape", [(512, 1024), (200, 300)])
def test_bytes_of_an_fp8_linear_are_those_of_its_tensors(scheme: str, shape: tuple[int, int]) -> None:
    rows, columns = shape
    scales = {"dynamic": rows, "static": 1, "block": -(-rows // 128) * -(-columns // 128)}[scheme]
    plan = a_plan("fp8", rows, columns, scheme=scheme)
    assert memory.linear_bytes(plan.modules[0], plan) == rows * columns + 2 * scales + 4 * (scheme == "static")


@pytest.mark.parametrize("symmetric", [True, False])
def test_bytes_of_an_int8_linear_by_groups_are_those_of_its_tensors(symmetric: bool) -> None:
    plan = a_plan("gptq", 512, 1024, bits=8, symmetric=symmetric)
    packed, scales, shape, zeros = 512 * 1024, 512 * 8 * 2, 16, 512 // 4 * 8 * 4
    assert memory.linear_bytes(plan.modules[0], plan) == packed + scales + shape + (0 if symmetric else zeros)


def test_fp8_is_refused_on_a_cpu_alone_and_int8_nowhere() -> None:
    for name, target in targets().items():
        assert bool(why_not_served(target, a_plan("fp8"), 1)) == (name == "cpu")
        assert why_not_served(target, a_plan("int8"), 1) == ""


@pytest.mark.parametrize("scheme", ["static", "block"])
@pytest.mark.parametrize("amx", [True, False])
def test_a_cpu_with_amx_runs_fp8_by_tensor_or_block(scheme: str, amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_has_amx", lambda: amx)
    why = why_not_served(targets()["cpu"], a_plan("fp8", scheme=scheme), 1)
    assert (why == "") == amx and (amx or "AMX" in why)
    if amx:
        assert "multiples of 32" in why_not_served(targets()["cpu"], a_plan("fp8", 48, scheme=scheme), 1)


@pytest.mark.parametrize(
    ("rows", "columns", "parallel", "served"),
    [(256, 256, 1, True), (192, 256, 1, True), (256, 192, 1, False), (384, 256, 2, False), (256, 256, 2, True)],
)
def test_blocks_of_fp8_are_never_cut_between_gpus(rows: int, columns: int, parallel: int, served: bool) -> None:
    why = why_not_served(targets()["h100-80gb"], a_plan("fp8", rows, columns, scheme="block"), parallel)
    assert (why == "") == served and (served or "multiples of 128" in why)


def test_int8_weights_alone_have_no_cpu_kernel_and_zero_points_only_machete() -> None:
    plan, asymmetric = (a_plan("gptq", 128, 128, bits=8, symmetric=symmetric) for symmetric in (True, False))
    assert "4 bits, not 8" in why_not_served(targets()["cpu"], plan, 1)
    for name in ("a100-80gb", "l40s", "h100-80gb"):
        assert why_not_served(targets()[name], plan, 1) == ""
        assert ("Machete" in why_not_served(targets()[name], asymmetric, 1)) == (name != "h100-80gb")
    assert "Machete" in why_not_served(targets()["h100-80gb"], a_plan("rtn", 64, 128, bits=8, symmetric=False), 1)


@pytest.mark.parametrize(("columns", "parallel", "served"), [(29568, 1, True), (29568, 2, False), (896, 2, False)])
def test_known_shapes_that_break_under_tensor_parallelism(columns: int, parallel: int, served: bool) -> None:
    assert (why_not_served(targets()["h100-80gb"], a_plan("awq", 1024, columns), parallel) == "") == served


def test_fused_linears_that_end_within_a_block_are_refused_and_the_last_part_may(tmp_path: Path) -> None:
    block = {"v": {"method": "fp8", "scheme": "block"}}
    assert faults_of(tmp_path, an_index(columns_of_down=384), block) == []  # q 256, k 128, v 128, gate and up 384
    (text,) = faults_of(tmp_path, an_index(columns_of_down=320), block)
    assert "mlp.gate_proj and 1 more: 320 rows end within a block of 128" in text and "up_proj:" not in text


# A checkpoint that no family describes


def an_unknown_index(**config: Any) -> Index:
    shapes = {
        "model.embed_tokens": (64, 32), "lm_head": (64, 32), "model.layers.0.self_attn.q_proj": (32, 32),
        "model.layers.0.self_attn.q_norm": (8,), "model.layers.0.mlp.gate": (4, 32),
        "model.layers.0.mlp.gate_proj": (32, 32), "model.layers.0.mlp.shared_expert_gate": (1, 32),
        "model.layers.0.mlp.experts.3.down_proj": (32, 32), "model.layers.0.mixer.conv1d": (32, 1, 4),
        "model.layers.0.self_attn.relative_attention_bias": (32, 4), "vision_tower.layers.0.fc1": (32, 32),
        "model.layers.0.block_sparse_moe.router": (4, 32), "mm_projector.0": (32, 32),
    }  # fmt: skip
    tensors = {
        f"{name}.weight": TensorInfo(dtype="BF16", shape=shape, file="m.safetensors", bytes=2 * prod(shape))
        for name, shape in shapes.items()
    }
    tensors["model.layers.0.mlp.experts.gate_up_proj"] = TensorInfo(
        dtype="BF16", shape=(4, 32, 32), file="m.safetensors", bytes=8192
    )
    return Index(root=Path("/nowhere"), config={"model_type": "novel", **config}, tensors=tensors, origin="test")


def plan_of(tmp_path: Path, index: Index, variants: dict[str, Any]) -> tuple[Plan, str]:
    recipe = Recipe.of({"name": "t", "model": {"source": "x"}, "variants": variants})
    plan, faults = preflight.make_plan(recipe, Path("t.yaml"), index, None, tmp_path)
    return plan, "\n".join(map(str, faults))


def test_an_unknown_family_keeps_all_that_is_not_clearly_a_linear_and_says_so(tmp_path: Path) -> None:
    index = an_unknown_index()
    plan, text = plan_of(tmp_path, index, {"fp8": {"method": "fp8"}})
    assert text == "" and plan.engine == "shards" and plan.calibration_tokens == 0
    (variant,) = plan.variants
    names = {module.name.removeprefix("model.layers.0.") for module in variant.modules}
    assert names == {"self_attn.q_proj", "mlp.gate_proj", "mlp.experts.3.down_proj"}
    matrices = {name.removesuffix(".weight") for name, tensor in index.tensors.items() if len(tensor.shape) > 1}
    matrices -= {"model.layers.0.mlp.experts.gate_up_proj"}
    assert set(variant.ignored) == matrices - {module.name for module in variant.modules} | {
        "model.layers.0.mlp.experts"
    }


def test_an_unknown_family_is_refused_where_the_model_would_have_to_run(tmp_path: Path) -> None:
    variants = {
        "awq": {"method": "awq", "group_size": 32},
        "gptq": {"method": "gptq", "group_size": 32},
        "static": {"method": "fp8", "scheme": "static"},
        "fine": {"method": "int8"},
    }
    _, text = plan_of(tmp_path, an_unknown_index(), variants)
    for name in ("awq", "gptq", "static"):
        assert f"variants.{name}.method" in text
    assert "variants.fine" not in text and "'novel'" in text and all(family in text for family in FAMILIES)


def test_linears_that_are_stored_transposed_are_refused(tmp_path: Path) -> None:
    assert "Conv1D" in plan_of(tmp_path, an_unknown_index(model_type="gpt2"), {"v": {"method": "fp8"}})[1]


def test_a_name_that_is_part_of_another_cannot_be_kept_in_the_awq_format(tmp_path: Path) -> None:
    rtn = {"method": "rtn", "group_size": 32}
    _, text = plan_of(tmp_path, an_unknown_index(), {"v": rtn | {"format": "awq"}})
    assert "model.layers.0.mlp.gate would keep model.layers.0.mlp.gate_proj too" in text
    assert plan_of(tmp_path, an_unknown_index(), {"v": rtn | {"format": "compressed-tensors"}})[1] == ""
