"""Laws of the whole pass on tiny models: folds are exact, nothing else changes, kills cost one block, bytes repeat."""

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
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from quantkit.checkpoint.index import read_index
from quantkit.engines import variant as solving
from quantkit.engines.inprocess import EightBitLinear, load_model
from quantkit.engines.onepass import quantize
from quantkit.errors import ArtifactError, SolveError
from quantkit.families import family_of
from quantkit.records import Index, Plan, VariantPlan

BLOCKS = 3


def make_model(folder: Path, kind: str = "llama", dtype: torch.dtype = torch.bfloat16, kv_heads: int = 2) -> Path:
    """A random model of three blocks with tied embeddings, loud norms and (Qwen2) biases."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        kind, hidden_size=64, intermediate_size=128, num_hidden_layers=BLOCKS, num_attention_heads=4,
        num_key_value_heads=kv_heads, vocab_size=64, tie_word_embeddings=True, dtype=dtype,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            around, spread = (1.0, 0.5) if parameter.ndim == 1 else (0.0, 0.2)
            parameter.copy_(around + spread * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def variant(index: Index, name: str, method: str, format: str, symmetric: bool, **changes: Any) -> VariantPlan:
    ignored = changes.pop("ignored", ())
    modules = family_of(index.config).linears(index.config, index.tensors)
    fields = {
        "name": name, "method": method, "format": format, "bits": 4, "group_size": 32, "symmetric": symmetric,
        "rounding": "gptq", "damping": 0.01, "ignored": ignored, "bytes": 0, "servable": True,
        "modules": tuple(module for module in modules if module.name not in ignored),
    }  # fmt: skip
    return VariantPlan(**(fields | changes))


def every_variant(index: Index) -> tuple[VariantPlan, ...]:
    return (
        variant(index, "awq", "awq", "awq", False),
        variant(index, "nearest", "awq", "compressed-tensors", True, rounding="nearest"),
        variant(index, "gptq", "gptq", "gptq", True),
        variant(index, "ct", "gptq", "compressed-tensors", False, group_size=-1),
        variant(index, "rtn", "rtn", "awq", False),
        variant(index, "fp8", "fp8", "compressed-tensors", True, group_size=0, bits=8),
        variant(index, "int8", "int8", "compressed-tensors", True, group_size=0, bits=8),
        variant(index, "static", "fp8", "compressed-tensors", True, group_size=0, bits=8, scheme="static"),
        variant(index, "block", "fp8", "compressed-tensors", True, group_size=0, bits=8, scheme="block"),
        variant(index, "gptq8", "gptq", "compressed-tensors", True, bits=8),
        variant(index, "rtn8", "rtn", "compressed-tensors", False, bits=8, group_size=-1),
    )


def run(
    index: Index, variants: tuple[VariantPlan, ...], out: Path, seed: int = 0, tokens: torch.Tensor | None = None
) -> list[dict[str, Any]]:
    if tokens is None:
        tokens = torch.randint(0, 64, (8, 32), generator=torch.Generator().manual_seed(seed))
    plan = Plan(
        family="x", variants=variants, source_bytes=0, peak_bytes=0, disk_bytes=0, calibration_tokens=256,
        kv_bytes_per_token=0, target="cpu",
    )  # fmt: skip
    quantize(index, plan, tokens, out / "artifacts", out / "ledger.jsonl", "digest")
    return [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]


def digests(out: Path) -> dict[str, str]:
    files = (path for path in out.rglob("*") if path.is_file())
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def logits(folder: Path) -> torch.Tensor:
    tokens = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(9))
    with torch.inference_mode():
        return load_model(folder)(tokens).logits.float().log_softmax(-1)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_what_is_not_quantized_comes_out_byte_equal_and_tied_stays_tied(tmp_path: Path) -> None:
    index = read_index(make_model(tmp_path / "model", "qwen2"))
    kept = ("model.layers.1.mlp.down_proj", "model.layers.0.self_attn.o_proj")
    plans = (
        variant(index, "awq", "awq", "awq", False, ignored=kept),
        variant(index, "gptq", "gptq", "gptq", True, ignored=kept),
    )
    run(index, plans, tmp_path / "out")
    source = tensors_of(index.root)
    for plan in plans:
        folder = tmp_path / "out" / "artifacts" / plan.name
        made = tensors_of(folder)
        assert "lm_head.weight" not in made
        model = load_model(folder)
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
        folded = ("layernorm", "v_proj.bias") if plan.name == "awq" else ("nothing",)
        for name in set(source) & set(made):
            if not any(part in name for part in folded):
                assert torch.equal(source[name].view(torch.uint8), made[name].view(torch.uint8)), name
        assert {f"{name}.weight" for name in kept} < set(made)
        before = json.loads((index.root / "config.json").read_text())
        after = json.loads((folder / "config.json").read_text())
        assert after.pop("quantization_config")["quant_method"] == plan.format and after == before


def test_the_same_run_gives_the_same_bytes_and_other_tokens_give_others(tmp_path: Path) -> None:
    index = read_index(make_model(tmp_path / "model"))
    plans = every_variant(index)[:3]
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(index, plans, tmp_path / name, seed)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert digests(tmp_path / "a") != digests(tmp_path / "c")


_KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {here!r})
import test_onepass as laws
from quantkit.checkpoint.index import read_index
from quantkit.engines import onepass
step, block = {step!r}, {block}
original = getattr(onepass, step)
calls = iter(range(100))
def deadly(*arguments):
    if next(calls) == block and {before}:
        os.kill(os.getpid(), signal.SIGKILL)
    result = original(*arguments)
    if arguments[1:2] == (block,) or step == "_close":
        os.kill(os.getpid(), signal.SIGKILL)
    return result
setattr(onepass, step, deadly)
index = read_index(Path({model!r}))
laws.run(index, laws.every_variant(index)[:3], Path({out!r}))
"""


@pytest.mark.parametrize(
    ("step", "block", "before"),
    [("_commit", 0, False), ("_commit", 1, True), ("_save_hidden", 2, True), ("_close", 0, False)],
)
def test_killed_anywhere_and_run_again_gives_the_same_bytes(
    step: str, block: int, before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = read_index(make_model(tmp_path / "model"))
    plans = every_variant(index)[:3]
    run(index, plans, tmp_path / "whole")
    out = tmp_path / "killed"
    script = _KILLED.format(
        here=str(Path(__file__).parent), step=step, block=block, before=before, model=str(index.root), out=str(out)
    )
    died = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    finished = len(list((out / "artifacts" / ".work").glob("block-*.json")))
    ran = []
    original = solving.solve_block

    def counted(plan: VariantPlan, family: Any, config: Any, prefix: str, *rest: Any) -> Any:
        ran.append(prefix)
        return original(plan, family, config, prefix, *rest)

    monkeypatch.setattr("quantkit.engines.onepass.solve_block", counted)
    run(index, plans, out)
    assert len(ran) == 3 * (BLOCKS - finished)
    assert finished == {"_commit": block + (not before), "_save_hidden": block - 1, "_close": BLOCKS}[step]
    assert digests(out) == digests(tmp_path / "whole")


def test_a_finished_run_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = read_index(make_model(tmp_path / "model"))
    plans = every_variant(index)[2:3]
    run(index, plans, tmp_path / "out")
    monkeypatch.setattr("quantkit.engines.onepass.solve_block", lambda *_: pytest.fail("solved again"))
    run(index, plans, tmp_path / "out")


def test_a_shard_that_changed_before_the_check_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quantkit.engines import onepass

    index = read_index(make_model(tmp_path / "model"))
    plans = every_variant(index)[2:3]
    original = onepass.finish

    def damaging(folder: Path, *rest: Any) -> None:
        path = folder / "model-00001-of-00004.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        original(folder, *rest)

    monkeypatch.setattr(onepass, "finish", damaging)
    with pytest.raises(ArtifactError, match=r"model\.layers\.0\..* differs from"):
        run(index, plans, tmp_path / "out")
    assert not (tmp_path / "out" / "artifacts" / "gptq" / "quantkit.json").exists()


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})
    index = read_index(folder)
    with pytest.raises(SolveError, match=r"model\.layers\.1\.mlp"):
        run(index, every_variant(index)[2:3], tmp_path / "out")


def test_identical_tokens_and_zero_rows_are_solved_without_nan(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"][3] = 0
    tensors["model.layers.0.input_layernorm.weight"][7] = 0
    tensors["model.layers.1.self_attn.q_proj.weight"][:, 32:] = 0
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})
    index = read_index(folder)
    plan = Plan(
        family="x", variants=every_variant(index), source_bytes=0, peak_bytes=0, disk_bytes=0, calibration_tokens=80,
        kv_bytes_per_token=0, target="cpu",
    )  # fmt: skip
    quantize(index, plan, torch.full((10, 8), 5), tmp_path / "a", tmp_path / "ledger.jsonl", "digest")
    for name in ("awq", "gptq", "fp8", "int8", "static", "block", "rtn8"):
        assert torch.isfinite(logits(tmp_path / "a" / name)).all()


@pytest.mark.parametrize(("name", "largest"), [("fp8", 448), ("int8", 127)])
def test_eight_bits_quantize_activations_too(tmp_path: Path, name: str, largest: int) -> None:
    index = read_index(make_model(tmp_path / "model"))
    run(index, every_variant(index)[5:7], tmp_path / "out")
    model = load_model(tmp_path / "out" / "artifacts" / name)
    linear = model.model.layers[0].mlp.up_proj
    assert isinstance(linear, EightBitLinear)
    token = torch.randn(1, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    scale = token.float().abs().max() / largest
    codes = token.float() / scale
    codes = codes.to(torch.float8_e4m3fn) if name == "fp8" else codes.round()
    rounded = codes.double() * scale.double()
    dense = linear.weight.double() * linear.scale_O.double()[:, None]
    torch.testing.assert_close(linear(token).double(), rounded @ dense.T, rtol=2**-7, atol=1e-3)
    assert not linear(torch.zeros(1, 64).bfloat16()).any()


def test_static_activations_have_the_calibrated_scale_and_clamp_beyond_it(tmp_path: Path) -> None:
    index = read_index(make_model(tmp_path / "model"))
    run(index, every_variant(index)[7:8], tmp_path / "out")
    folder = tmp_path / "out" / "artifacts" / "static"
    stored = tensors_of(folder)
    tokens = torch.randint(0, 64, (8, 32), generator=torch.Generator().manual_seed(0))  # as `run` calibrates
    source = load_model(index.root)
    seen: dict[str, float] = {}
    for name, module in source.named_modules():
        if f"{name}.input_scale" in stored:
            note = lambda _, inputs, name=name: seen.update({name: float(inputs[0].abs().max())})  # noqa: E731
            module.register_forward_pre_hook(note)
    with torch.inference_mode():
        source(tokens)
    assert len(seen) == 7 * BLOCKS
    for name, largest in seen.items():
        # Batches of other sizes may round a bfloat16 differently.
        assert float(stored[f"{name}.input_scale"]) * 448 == pytest.approx(largest, rel=0.02)
    for block in range(BLOCKS):
        for parts in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            ends = [[float(stored[f"model.layers.{block}.{part}.{end}"]) for part in parts] for end in
                    ("weight_scale", "input_scale")]  # fmt: skip
            assert all(len(set(values)) == 1 for values in ends)
    linear = load_model(folder).model.layers[1].mlp.down_proj
    limit = 448 * float(linear.input_scale)
    loud = torch.full((1, 128), 50 * limit).bfloat16()
    loud[0, ::2] *= -1
    assert torch.equal(linear(loud), linear(loud.clamp(-limit, limit)))


def test_block_activations_are_scaled_by_128_columns(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(5)
    weight_OI = torch.randn(130, 200, generator=random)
    from quantkit.engines.codes import eight_bits

    (codes,) = eight_bits("fp8", "block", [weight_OI], torch.bfloat16)
    linear = EightBitLinear(codes, None, torch.bfloat16)
    input_TI = torch.randn(3, 200, generator=random).bfloat16() * 100
    input_TI[0] = 0
    expected_TO = torch.zeros(3, 130, dtype=torch.float64)
    for left in (0, 128):
        part_TC = input_TI[:, left : left + 128].double()
        scale_T = part_TC.abs().amax(1).float() / 448
        codes_TC = (part_TC.float() / scale_T[:, None].clamp(min=1e-20)).to(torch.float8_e4m3fn).double()
        for top in (0, 128):
            block_OC = codes.codes_OI[top : top + 128, left : left + 128].double()
            scale = float(codes.scale_OG[top // 128, left // 128])
            expected_TO[:, top : top + 128] += scale_T[:, None].double() * scale * (codes_TC @ block_OC.T)
    torch.testing.assert_close(linear(input_TI).double(), expected_TO, rtol=2**-7, atol=1e-2)
