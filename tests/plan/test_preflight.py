"""What headers and config show to be wrong is said before work, all of it; the bytes are those of the shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantkit.families import FAMILIES
from quantkit.plan import memory, preflight
from quantkit.plan.kernels import targets, why_not_served
from quantkit.recipe import Recipe
from quantkit.records import Index, Module, TensorInfo

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


@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_bytes_of_an_awq_linear_are_those_of_its_tensors(group: int) -> None:
    rows, columns = 512, 1024
    groups = 1 if group == -1 else columns // group
    qweight, qzeros, scales = columns * (rows // 8) * 4, groups * (rows // 8) * 4, groups * rows * 2
    module = Module(name="m", rows=rows, columns=columns)
    assert memory.linear_bytes(module, "awq", group, symmetric=False) == qweight + qzeros + scales
    g_idx = columns * 4
    assert memory.linear_bytes(module, "gptq", group, symmetric=True) == qweight + qzeros + scales + g_idx


def test_fp8_is_refused_on_a_cpu_alone_and_int8_nowhere() -> None:
    modules = (Module(name="m", rows=64, columns=64),)
    for name, target in targets().items():
        assert bool(why_not_served(target, "fp8", 0, modules, 1)) == (name == "cpu")
        assert why_not_served(target, "int8", 0, modules, 1) == ""


@pytest.mark.parametrize(("columns", "parallel", "served"), [(29568, 1, True), (29568, 2, False), (896, 2, False)])
def test_known_shapes_that_break_under_tensor_parallelism(columns: int, parallel: int, served: bool) -> None:
    modules = (Module(name="m", rows=1024, columns=columns),)
    assert (why_not_served(targets()["h100-80gb"], "awq", 128, modules, parallel) == "") == served
