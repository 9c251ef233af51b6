"""Facts per model family, as a table: where the blocks are, which linears share an input, which pairs fold.

Adding a family is one line in the table; the laws of tests/ run over all of it, on the tiny model that one line in
tests/conftest.py gives it. Names are relative to a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quantkit.errors import Fault, PlanError
from quantkit.records import Module, TensorInfo


@dataclass(frozen=True)
class Fold:
    """`before` can be divided by a scale per channel that the columns of `linears` are multiplied by."""

    before: str
    """A norm (one weight per channel), or a linear (one output row per channel; of q/k/v or gate/up stored as one
    linear the last rows are the channels)."""
    linears: tuple[str, ...]
    repeats_heads: bool = False
    """Grouped queries repeat the output heads of `before`: the scale is one per channel of the stored heads."""
    adds_one: bool = False
    """The norm multiplies by 1 + its weight."""
    also: tuple[str, ...] = ()
    """Linears that read the same input and are never quantized (the router): their columns are multiplied as well."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: the checkpoint has `gate`, which chooses, and each expert's linears by its number."""

    module: str
    """The part of a block that holds them."""
    parts: tuple[str, str, str]
    """What the checkpoint calls the gate, up and down of an expert."""
    loaded: str = "mlp"
    """What transformers calls `module`."""


@dataclass(frozen=True)
class Family:
    name: str
    inputs: tuple[tuple[str, ...], ...]
    """The linears of a block in groups that share one input, in the order in which they run."""
    folds: tuple[Fold, ...]
    """In the order in which they run; each has the linears of one group of `inputs`."""
    fused: tuple[tuple[str, ...], ...]
    """Linears (last part of the name) that vLLM fuses into one, so that their schemes must agree."""
    fused_names: tuple[str, ...]
    """What vLLM calls each of `fused`."""
    experts: Experts | None = None
    scales_embedding: bool = False
    """The first block reads the embedding times the square root of its width."""
    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    head: str = "lm_head"

    def blocks(self, config: Mapping[str, Any]) -> int:
        """Number of decoder blocks."""
        return int(config["num_hidden_layers"])

    def prefix(self, block: int) -> str:
        """What the names of a block's tensors begin with, its dot included."""
        return f"{self.layers}.{block}."

    @property
    def routers(self) -> tuple[str, ...]:
        """Linears of a block that are never quantized: they choose the experts."""
        return tuple(name for fold in self.folds for name in fold.also)

    @property
    def pooled(self) -> tuple[str, ...]:
        """First linears of the inputs that one expert has of its own: few tokens may reach it."""
        return tuple(fold.linears[0] for fold in self.folds if fold.before.partition(".")[2].startswith("experts."))

    def loaded(self, name: str) -> str:
        """What transformers calls a module or tensor of the checkpoint, its experts taken for separate linears."""
        experts = self.experts
        return name.replace(f"{experts.module}.", f"{experts.loaded}.") if experts else name

    def spread(self, count: int) -> Family:
        """With `count` experts where the table has a *. They share the input of gate and up, not that of down."""
        folds: list[Fold] = []
        for fold in self.folds:
            if "*" in fold.before:
                folds += [
                    replace(fold, before=fold.before.replace("*", number), linears=_spread(fold.linears, [number]))
                    for number in map(str, range(count))
                ]
            else:
                folds.append(replace(fold, linears=_spread(fold.linears, map(str, range(count)))))
        fused = tuple(_spread(parts, map(str, range(count))) for parts in self.fused)
        return replace(self, inputs=tuple(fold.linears for fold in folds), folds=tuple(folds), fused=fused)

    def linears(self, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> tuple[Module, ...]:
        """Every linear of every block, in the order in which they run.

        Raises PlanError naming each linear that the checkpoint lacks.
        """
        names = [
            self.prefix(block) + linear
            for block in range(self.blocks(config))
            for group in self.inputs
            for linear in group
        ]
        do = "give a complete checkpoint; its config.json must be its own"
        routers = [self.prefix(block) + name for block in range(self.blocks(config)) for name in self.routers]
        missing = [name for name in (*names, *routers) if f"{name}.weight" not in tensors]
        if missing:
            raise PlanError(*(Fault(f"{name}.weight is missing", f"family {self.name}", do) for name in missing))
        return tuple(
            Module(name=name, rows=shape[0], columns=shape[1])
            for name in names
            for shape in [tensors[f"{name}.weight"].shape]
        )


def _spread(names: Iterable[str], numbers: Iterable[str]) -> tuple[str, ...]:
    """Each name once for every number in the place of its *; names without one stay."""
    return tuple(dict.fromkeys(name.replace("*", number) for number in numbers for name in names))


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_PARTS = ("gate_proj", "up_proj", "down_proj")
_MLP = tuple(f"mlp.{part}" for part in _PARTS)


def _family(
    name: str,
    qkv: tuple[str, ...] = _QKV,
    mlp: tuple[str, ...] = _MLP,
    mlp_norm: str = "post_attention_layernorm",
    adds_one: bool = False,
    scales_embedding: bool = False,
    experts: Experts | None = None,
) -> Family:
    """Norm, attention, norm, gated MLP. The last of `qkv` makes v; the last two of `mlp` make up and down."""
    routers: tuple[str, ...] = ()
    if experts:
        mlp = tuple(f"{experts.module}.experts.*.{part}" for part in experts.parts)
        routers = (f"{experts.module}.gate",)
    gate_up, down = mlp[:-1], mlp[-1:]
    named = {"qkv_proj": qkv, "experts": mlp} if experts else {"qkv_proj": qkv, "gate_up_proj": gate_up}
    fused = {whole: tuple(n.partition(".")[2] for n in parts) for whole, parts in named.items() if len(parts) > 1}
    return Family(
        name=name,
        inputs=(qkv, ("self_attn.o_proj",), gate_up, down),
        folds=(
            Fold("input_layernorm", qkv, adds_one=adds_one),
            Fold(qkv[-1], ("self_attn.o_proj",), repeats_heads=True),
            Fold(mlp_norm, gate_up, adds_one=adds_one, also=routers),
            Fold(gate_up[-1], down),
        ),
        fused=tuple(fused.values()),
        fused_names=tuple(fused),
        experts=experts,
        scales_embedding=scales_embedding,
    )


_TABLE = (
    _family("llama"),  # Llama 2 and 3, SmolLM
    _family("mistral"),
    _family("qwen2"),  # biases on q, k, v
    _family("qwen3"),  # norms on the heads of q and k, behind the linears
    _family("phi3", qkv=("self_attn.qkv_proj",), mlp=("mlp.gate_up_proj", "mlp.down_proj")),  # Phi-3, Phi-4
    _family("gemma2", mlp_norm="pre_feedforward_layernorm", adds_one=True, scales_embedding=True),
    _family("gemma3_text", mlp_norm="pre_feedforward_layernorm", adds_one=True, scales_embedding=True),
    _family("mixtral", experts=Experts("block_sparse_moe", ("w1", "w3", "w2"))),
    _family("qwen3_moe", experts=Experts("mlp", _PARTS)),
)

FAMILIES: dict[str, Family] = {family.name: family for family in _TABLE}
"""By `model_type` of config.json; * is the number of an expert."""
_COUNTS = ("num_experts", "num_local_experts")
"""Keys of config.json under which the number of experts stands."""


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config, with the experts that it has. Raises PlanError for one that the table lacks."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        what = f"model_type {kind!r} is not in the table of families ({', '.join(FAMILIES)})"
        raise PlanError(Fault(what, "config.json: model_type", "use a model of these families, or add a line there"))
    family = FAMILIES[kind]
    if not family.experts:
        return family
    count = next((int(config[key]) for key in _COUNTS if config.get(key)), 0)
    if not count:
        raise PlanError(Fault("the number of experts is missing", f"config.json: {_COUNTS[0]}", "add it"))
    return family.spread(count)
