"""A model and a tokenizer small enough to score whole suites: one token a byte, and one for each of ' A' to ' D'."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def make_model():
    def make(seed=0, **changes):
        torch.manual_seed(seed)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = LlamaConfig(vocab_size=264, **{"max_position_embeddings": 8192, **sizes, **changes})
        model = LlamaForCausalLM(config).eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim == 2:
                    weight.mul_(8)  # fresh weights say nearly the same of every token
        return model

    return make


@pytest.fixture(scope="session")
def make_tokenizer():
    def make(leading=0, extra=""):
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        words = ["<s>", "</s>", *letters, "ĠA", "ĠB", "ĠC", "ĠD"]
        vocabulary = {word: number for number, word in enumerate(words)}
        fast = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ġ", letter) for letter in "ABCD"]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
        if leading:
            fast.post_processor = processors.TemplateProcessing(
                single="<s> " * leading + "$A", special_tokens=[("<s>", 0)]
            )
        special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"} | (
            {"unk_token": extra} if extra else {}
        )
        return PreTrainedTokenizerFast(tokenizer_object=fast, **special)

    return make
