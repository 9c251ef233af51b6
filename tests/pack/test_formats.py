"""Every format against a decoder that reads bits one by one, and against the compressed-tensors library."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationConfig
from torch import Tensor

from quantkit.pack import FORMATS, Codes
from quantkit.records import VariantPlan

GROUPS = [32, 64, 128, -1]
ROWS, COLUMNS = 24, 128


def codes(group_size: int, zeros: bool, bits: int = 4) -> Codes:
    random = torch.Generator().manual_seed(3)
    groups = 1 if group_size == -1 else COLUMNS // group_size
    return Codes(
        torch.randint(0, 2**bits, (ROWS, COLUMNS), generator=random).to(torch.uint8),
        torch.rand(ROWS, groups, generator=random).to(torch.bfloat16),
        torch.randint(0, 2**bits, (ROWS, groups), generator=random).to(torch.uint8) if zeros else None,
        bits,
    )


def plan(
    format: str,
    method: str,
    group_size: int,
    symmetric: bool,
    ignored: tuple[str, ...] = (),
    bits: int = 4,
    scheme: str = "dynamic",
) -> VariantPlan:
    return VariantPlan(
        name="v", method=method, format=format, bits=bits, group_size=group_size, symmetric=symmetric, scheme=scheme,
        rounding="gptq", damping=0.01, modules=(), ignored=ignored, bytes=0, servable=True,
    )  # fmt: skip


def nibble(word: int, place: int) -> int:
    """Python's own integers: no shift of a signed tensor."""
    return ((word + 2**32) % 2**32) // 16**place % 16


def same(left: Codes, right: Codes) -> bool:
    pairs = [(left.codes_OI, right.codes_OI), (left.scale_OG, right.scale_OG), (left.zero_OG, right.zero_OG)]
    equal = all(a is b is None or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)
    return equal and left.bits == right.bits


@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize(
    ("format", "zeros", "bits"),
    [
        ("awq", True, 4),
        ("gptq", False, 4),
        *(("compressed-tensors", zeros, bits) for zeros in (True, False) for bits in (4, 8)),
    ],
)
def test_every_format_gives_back_what_it_took(format: str, zeros: bool, bits: int, group_size: int) -> None:
    made = codes(group_size, zeros, bits)
    stored = FORMATS[format].pack(made)
    assert set(stored) == set(FORMATS[format].suffixes(plan(format, "rtn", group_size, not zeros)))
    assert all(tensor.is_contiguous() for tensor in stored.values())
    assert same(FORMATS[format].unpack(stored), made)


@pytest.mark.parametrize("group_size", GROUPS)
def test_awq_words_read_bit_by_bit(group_size: int) -> None:
    made = codes(group_size, True)
    stored = FORMATS["awq"].pack(made)
    groups = made.scale_OG.shape[1]
    assert stored["qweight"].shape == (COLUMNS, ROWS // 8) and stored["qzeros"].shape == (groups, ROWS // 8)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    for word in range(ROWS // 8):
        for place, offset in enumerate(order):
            row = 8 * word + offset
            for column in range(COLUMNS):
                assert nibble(int(stored["qweight"][column, word]), place) == made.codes_OI[row, column]
            for group in range(groups):
                assert nibble(int(stored["qzeros"][group, word]), place) == made.zero_OG[row, group]
                assert stored["scales"][group, row] == made.scale_OG[row, group]


@pytest.mark.parametrize("group_size", GROUPS)
def test_gptq_words_read_bit_by_bit(group_size: int) -> None:
    made = codes(group_size, False)
    stored = FORMATS["gptq"].pack(made)
    for row in range(ROWS):
        for column in range(COLUMNS):
            word = int(stored["qweight"][column // 8, row])
            assert nibble(word, column % 8) == made.codes_OI[row, column]
    assert {int(word) % 2**32 for word in stored["qzeros"].flatten()} == {0x77777777}
    width = COLUMNS if group_size == -1 else group_size
    assert stored["g_idx"].tolist() == [column // width for column in range(COLUMNS)]


@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize(("bits", "middle"), [(4, 8), (8, 128)])
def test_compressed_tensors_against_the_library(group_size: int, zeros: bool, bits: int, middle: int) -> None:
    made = codes(group_size, zeros, bits)
    stored = FORMATS["compressed-tensors"].pack(made)
    signed = (made.codes_OI.int() - middle).to(torch.int8)
    assert torch.equal(stored["weight_packed"], pack_to_int32(signed, bits))
    assert torch.equal(unpack_from_int32(stored["weight_packed"], bits, torch.Size((ROWS, COLUMNS))), signed)
    assert stored["weight_shape"].tolist() == [ROWS, COLUMNS]
    if made.zero_OG is not None:
        signed_zero = (made.zero_OG.int() - middle).to(torch.int8)
        assert torch.equal(stored["weight_zero_point"], pack_to_int32(signed_zero, bits, packed_dim=0))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_eight_bits_are_stored_as_they_are(dtype: torch.dtype) -> None:
    made = Codes((40 * torch.randn(ROWS, COLUMNS)).to(dtype), torch.rand(ROWS, 1).to(torch.bfloat16), None)
    stored: dict[str, Tensor] = FORMATS["compressed-tensors"].pack(made)
    assert stored["weight"].dtype == dtype and stored["weight_scale"].shape == (ROWS, 1)
    back = FORMATS["compressed-tensors"].unpack(stored)
    assert torch.equal(back.codes_OI.view(torch.uint8), made.codes_OI.view(torch.uint8))


@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_library_reads_its_config(group_size: int, symmetric: bool, bits: int) -> None:
    asked = plan("compressed-tensors", "gptq", group_size, symmetric, ("a.b",), bits)
    made = FORMATS["compressed-tensors"].config(asked, {})
    read = QuantizationConfig.model_validate(made)
    weights = read.config_groups["group_0"].weights
    assert read.ignore == ["lm_head", "a.b"]
    assert read.format == "pack-quantized" and weights.num_bits == bits and weights.symmetric == symmetric
    assert weights.group_size == (None if group_size == -1 else group_size)


@pytest.mark.parametrize(("method", "kind"), [("fp8", "float"), ("int8", "int")])
def test_the_library_reads_eight_bits_by_rows_with_dynamic_activations(method: str, kind: str) -> None:
    made = FORMATS["compressed-tensors"].config(plan("compressed-tensors", method, 0, True), {})
    read = QuantizationConfig.model_validate(made)
    scheme = read.config_groups["group_0"]
    assert read.format == f"{kind}-quantized" and scheme.input_activations.dynamic is True
    assert (scheme.weights.num_bits, scheme.weights.type, scheme.weights.strategy) == (8, kind, "channel")
    assert (scheme.input_activations.num_bits, scheme.input_activations.strategy) == (8, "token")


@pytest.mark.parametrize(
    ("scheme", "weights", "inputs", "dynamic"),
    [("static", "tensor", "tensor", False), ("block", "block", "group", True)],
)
def test_the_library_reads_the_other_schemes_of_fp8(scheme: str, weights: str, inputs: str, dynamic: bool) -> None:
    asked = plan("compressed-tensors", "fp8", 0, True, bits=8, scheme=scheme)
    read = QuantizationConfig.model_validate(FORMATS["compressed-tensors"].config(asked, {}))
    found = read.config_groups["group_0"]
    assert read.format == "float-quantized" and found.weights.type == found.input_activations.type == "float"
    assert (found.weights.strategy, found.weights.dynamic) == (weights, False)
    assert (found.input_activations.strategy, found.input_activations.dynamic) == (inputs, dynamic)
    if scheme == "block":
        assert found.weights.block_structure == [128, 128] and found.input_activations.group_size == 128


def test_the_scale_of_static_activations_is_stored_and_comes_back() -> None:
    values = torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn)
    made = Codes(values, torch.rand(1).to(torch.bfloat16), None, 8, torch.rand(1))
    stored = FORMATS["compressed-tensors"].pack(made)
    static = plan("compressed-tensors", "fp8", 0, True, bits=8, scheme="static")
    assert tuple(stored) == FORMATS["compressed-tensors"].suffixes(static)
    assert stored["input_scale"].dtype == torch.float32 and stored["weight_scale"].shape == (1,)
    back = FORMATS["compressed-tensors"].unpack(stored)
    assert back.input_scale is not None and torch.equal(back.input_scale, stored["input_scale"])


def test_kept_modules_stand_in_the_configs_also_by_their_fused_name() -> None:
    name, fused = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.qkv_proj"
    awq = FORMATS["awq"].config(plan("awq", "awq", 64, False, (name,)), {name: fused})
    gptq = FORMATS["gptq"].config(plan("gptq", "gptq", 64, True, (name,)), {name: fused})
    assert awq["modules_to_not_convert"] == [name] and awq["zero_point"] is True
    assert len(gptq["dynamic"]) == 2 and gptq["sym"] is True and gptq["desc_act"] is False
