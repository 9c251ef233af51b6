"""The nouns of the pipeline, frozen, in the order in which they arise. Read this first.

    Index -> Plan -> (Statistics -> Solution, per block) -> Artifact -> Scores -> Timings -> Judgement -> Verdict

Records that live on disk are pydantic models (`write`, `read`); those of one block, which hold tensors, are
dataclasses. Shape suffixes: O output rows, I input columns, G groups of input columns, T tokens.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from quantkit.errors import ArtifactError, Fault

if TYPE_CHECKING:
    from torch import Tensor

Outcome = Literal["pass", "fail", "inconclusive"]


class Record(BaseModel):
    """Frozen, JSON on disk; files appear whole or not at all."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def write(self, path: Path) -> None:
        write_text(path, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ArtifactError where the file is missing, or is not such a record."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            do = "run the command again, or delete the file: it is then made anew"
            raise ArtifactError(Fault(f"no readable {cls.__name__}: {error}", str(path), do)) from None


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: temporary name, fsync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")


# checkpoint ─index→ Index


class TensorInfo(Record):
    """One tensor of a checkpoint as its safetensors header tells it."""

    dtype: str  # as safetensors spells it: F32, F16, BF16, I32, F8_E4M3, ...
    shape: tuple[int, ...]
    file: str  # name within the checkpoint folder
    bytes: int


class Index(Record):
    """A checkpoint from its headers and config alone; no weight was read."""

    root: Path
    """The folder; for a GGUF that is not converted yet, the folder that the conversion will make."""
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    origin: str
    """What the recipe named: a folder, hub id @ commit, or package:NAME/FILE."""
    quantized_origin: str | None = None
    """How the source was quantized before quantkit saw it (for example 'GGUF Q4_1'); None: it was not."""

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors.values())


# Index ─plan→ Plan


class Module(Record):
    """One linear that the plan quantizes: `name`.weight is [rows, columns] = [out_features, in_features]."""

    name: str
    rows: int
    columns: int


class VariantPlan(Record):
    name: str
    method: str
    format: str
    bits: int
    group_size: int
    """-1: a whole row. 0: no groups; codes of eight bits for activations too (FP8, INT8), scaled as `scheme` says."""
    symmetric: bool
    rounding: str
    damping: float
    scheme: str = "dynamic"
    modules: tuple[Module, ...]
    ignored: tuple[str, ...]
    """Linears kept as they are, by full name (lm_head among them where the model has one of its own)."""
    bytes: int
    """Predicted size of the artifact's weights."""
    servable: bool
    why_not: str = ""


class Plan(Record):
    family: str
    engine: Literal["onepass", "shards"] = "onepass"
    """'shards': of a family that nobody knows; what needs no forward is made shard by shard."""
    variants: tuple[VariantPlan, ...]
    source_bytes: int
    peak_bytes: int
    """Predicted peak memory of the quantize stage."""
    disk_bytes: int
    calibration_tokens: int
    kv_bytes_per_token: int
    target: str


# hidden states ─calibrate→ Statistics ─solve→ Solution


@dataclass(frozen=True)
class Statistics:
    """What one distinct linear input looked like over the calibration tokens (full-precision stream)."""

    gram_II: Tensor
    """mean over tokens of x xT, float32."""
    mean_abs_I: Tensor
    max_abs_I: Tensor
    tokens: int


@dataclass(frozen=True)
class Solution:
    """One linear, quantized. Codes with their scales."""

    codes_OI: Tensor
    """Groups: uint8, 0..15 or 0..255. INT8 with activations: int8. FP8: float8_e4m3fn."""
    scale_OG: Tensor
    """In the dtype that is stored. FP8 and INT8: [O, 1]; block: [ceil(O / 128), ceil(I / 128)]; static: [1]."""
    zero_OG: Tensor | None
    """uint8 zero points; None: symmetric (the zero point is the middle: 8, or 128)."""
    used: str
    """The method in truth: 'awq', 'gptq', 'rtn', 'fp8' or 'int8'."""
    damping: float
    error: float
    """tr((W - Q) H (W - Q)T) / tr(W H WT) of what is stored."""
    rtn_error: float
    """The same for plain rounding."""
    input_scale: Tensor | None = None
    """FP8 static: float32 [1]."""


class LedgerLine(Record):
    """One module of one variant, as ledger.jsonl tells it."""

    variant: str
    module: str
    asked: str
    used: str
    tokens: int  # 0: made without a forward; errors are then of the weights alone, as if H were the identity
    damping: float
    error: float
    rtn_error: float


# shards ─verify→ Artifact


class Artifact(Record):
    """quantkit.json in the model folder: the manifest."""

    variant: str
    method: str
    format: str
    origin: str
    quantized_origin: str | None
    recipe_digest: str
    versions: dict[str, str]
    files: dict[str, str]  # sha256 of every other file of the folder
    bytes: int  # of the weight shards


# Artifact ─evaluate→ Scores


class TaskScore(Record):
    metric: str
    value: float
    stderr: float
    n: int
    chance: float | None = None  # what guessing gives, where that is known (0.25 for four choices)


class Scores(Record):
    """scores/<variant>/<suite>.json. Items stand in the JSON-lines file `items` beside it.

    An item of a choice or code task: {"id", "task", "correct": 0 or 1}. An item of the perplexity suite is one
    window: {"id", "nll": [per token], "kl": [...], "top1": [...]} (the source has kl 0, top1 1).
    """

    suite: str
    variant: str
    artifact: str | None = None
    """Digest of the weights that were asked, where the caller gave one."""
    backend: str
    fingerprint: str
    settings: dict[str, Any]  # what the fingerprint is the digest of
    tasks: dict[str, TaskScore]
    items: str
    limit: int | None = None
    guard: str | None = None  # code suites: which isolation was in force
    seconds: float


# Endpoint ─load→ Timings


class LoadRun(Record):
    """One run of the load generator."""

    completed: int
    failed: int
    output_tokens: int
    output_throughput: float  # output tokens per second
    median_ttft_ms: float
    p99_ttft_ms: float
    median_tpot_ms: float
    p99_tpot_ms: float
    seconds: float


class Pair(Record):
    """Source and variant under the same load with the same seed, one right after the other."""

    seed: int
    baseline: LoadRun
    variant: LoadRun


class RegimeTimings(Record):
    concurrency: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    min_ratio: float
    pairs: tuple[Pair, ...]
    ratio: float
    """Geometric mean over the pairs of variant / baseline output throughput."""
    low: float
    high: float
    verdict: Outcome
    why: str = ""
    faults: tuple[str, ...] = ()
    """What makes the load runs void (failed requests, unequal tokens, prefix-cache hits); any is a fail."""


class Timings(Record):
    """timings/<variant>.json"""

    variant: str
    baseline: str
    target: str
    regimes: tuple[RegimeTimings, ...]
    versions: dict[str, str]
    flags: tuple[str, ...]  # of both servers
    kernel: str  # as the log of the variant's server names it


# Scores + Timings ─gates→ Judgement ─select→ Verdict


class Judgement(Record):
    """One accuracy gate: a variant against the source on one suite."""

    suite: str
    required: bool
    task: str
    measure: str
    """'drop' (source minus variant, in points of the metric) or 'ratio' (perplexity variant / source)."""
    value: float
    low: float
    high: float
    """One-sided bounds at the recipe's confidence."""
    margin: float
    outcome: Outcome
    n: int
    needed: int | None = None
    """Inconclusive: about how many items would decide."""
    source_at_chance: bool = False
    why: str


class VariantVerdict(Record):
    accuracy: Outcome
    throughput: Literal["pass", "fail", "inconclusive", "not servable", "not measured"]
    bytes: int
    why: tuple[str, ...]
    judgements: tuple[Judgement, ...]


class Verdict(Record):
    """verdict.json"""

    chosen: str | None
    objective: str
    variants: dict[str, VariantVerdict]
    source_bytes: int
    quantized_origin: str | None = None


# The run itself


class Stage(Record):
    state: Literal["pending", "running", "done", "failed"] = "pending"
    seconds: float = 0.0  # over all attempts
    key: str = ""  # digest of the settings that it ran under


class Run(Record):
    """run.json: what was run, on what, and how far it came."""

    recipe: dict[str, Any]
    recipe_digest: str
    origin: str
    quantized_origin: str | None
    source_digest: str
    """sha256 over config.json and the tensor headers of the source."""
    calibration_digest: str | None = None
    """sha256 of the calibration token ids."""
    versions: dict[str, str]
    machine: dict[str, str]
    stages: dict[str, Stage]
