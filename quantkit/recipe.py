"""A recipe: one YAML file is one run. Unknown keys are refused; every fault is reported at once."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from quantkit.errors import Fault, RecipeError

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]
Method = Literal["awq", "gptq", "fp8", "int8", "rtn"]
Format = Literal["awq", "gptq", "compressed-tensors"]

FORMATS_OF_METHOD: dict[str, tuple[str, ...]] = {
    "awq": ("awq", "compressed-tensors"),
    "gptq": ("gptq", "compressed-tensors"),
    "rtn": ("awq", "gptq", "compressed-tensors"),
    "fp8": ("compressed-tensors",),
    "int8": ("compressed-tensors",),
}


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Model(Part):
    source: str
    revision: str | None = None
    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    """The dtype of a checkpoint that quantkit itself writes (a converted GGUF); others keep their own."""


class Calibration(Part):
    """`set` names a file of the folder calibration/ (or is a path to a YAML of that kind)."""

    set: str = "python-docs"
    samples: Annotated[int, Field(ge=1)] = 64
    length: Annotated[int, Field(ge=8)] = 512
    """Tokens a sample."""
    seed: int = 0


class Variant(Part):
    method: Method
    bits: Literal[4, 8] | None = None
    """Of the weights. None: 4, and 8 for methods fp8 and int8."""
    group_size: Annotated[int, Field(ge=-1)] | None = None
    """Input columns that share one scale; -1: a whole row. None: 128, and nothing for methods fp8 and int8."""
    format: Format | None = None
    scheme: Literal["dynamic", "static", "block"] | None = None
    """Methods fp8 and int8: how activations (and weights) are scaled. None: dynamic."""
    symmetric: bool | None = None
    """None: what the format loads; compressed-tensors: INT4 asymmetric, INT8 symmetric (which more kernels run)."""
    rounding: Literal["gptq", "nearest"] = "gptq"
    """How the AWQ-scaled weight is rounded; 'nearest' is AWQ as published."""
    damping: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """Share of the mean diagonal of the Gram that is added to it."""
    ignore: tuple[str, ...] = ()
    """Names or globs of modules kept in full precision; each must match at least one."""

    @property
    def needs_forward(self) -> bool:
        """Whether it is made from what the model's activations looked like, and not from its weights alone."""
        return self.method in ("awq", "gptq") or self.scheme == "static"

    @model_validator(mode="after")
    def settle(self) -> Self:
        """Fill in what the method implies and refuse what no loader reads."""
        allowed = FORMATS_OF_METHOD[self.method]
        if self.format is None:
            # The formats awq and gptq hold 4 bits only.
            object.__setattr__(self, "format", allowed[-1 if self.bits == 8 and self.method != "awq" else 0])
        if self.format not in allowed:
            raise ValueError(
                f"format {self.format!r} cannot hold method {self.method!r}; use one of {', '.join(allowed)}"
            )
        if self.rounding != "gptq" and self.method != "awq":
            raise ValueError("rounding is that of the AWQ-scaled weight; use method rtn for plain rounding")
        if self.method in ("fp8", "int8"):
            self._settle_activations()
        else:
            self._settle_groups()
        return self

    def _settle_activations(self) -> None:
        """Weights and activations of eight bits."""
        if self.bits == 4:
            raise ValueError(f"method {self.method} has eight bits; use bits: 8, or method awq, gptq or rtn")
        if self.group_size is not None:
            raise ValueError(f"method {self.method} has no groups; its scheme says what shares a scale")
        if self.symmetric is False:
            raise ValueError(
                f"vLLM loads method {self.method} only symmetric; bits: 8 with gptq or rtn has zero points"
            )
        if self.method == "int8" and self.scheme not in (None, "dynamic"):
            raise ValueError(f"scheme {self.scheme!r} belongs to method fp8; int8 is made dynamic only")
        object.__setattr__(self, "bits", 8)
        object.__setattr__(self, "scheme", self.scheme or "dynamic")
        object.__setattr__(self, "symmetric", True)

    def _settle_groups(self) -> None:
        """Weights alone, by groups of columns."""
        if self.scheme is not None:
            raise ValueError("scheme belongs to methods fp8 and int8")
        object.__setattr__(self, "bits", self.bits or 4)
        object.__setattr__(self, "group_size", 128 if self.group_size is None else self.group_size)
        if self.bits == 8 and self.method == "awq":
            raise ValueError("AWQ is made with 4 bits only; use gptq or rtn with bits: 8, or method int8 or fp8")
        if self.bits == 8 and self.format != "compressed-tensors":
            raise ValueError(f"format {self.format!r} is loaded with 4 bits only; use compressed-tensors for bits: 8")
        if self.group_size != -1 and (self.group_size == 0 or (self.group_size or 0) % 2):
            raise ValueError("no kernel takes such groups; use 32, 64, 128, or -1 for a whole row")
        fixed = {"awq": False, "gptq": True}.get(self.format or "")
        if fixed is not None and self.symmetric not in (None, fixed):
            word = "symmetric" if fixed else "asymmetric"
            raise ValueError(f"vLLM loads format {self.format!r} only {word}; use compressed-tensors for the other")
        if self.symmetric is None:
            object.__setattr__(self, "symmetric", self.bits == 8 if fixed is None else fixed)


class Evaluate(Part):
    suites: tuple[Name, ...]
    baseline: Literal["source"] = "source"
    limit: dict[Name, Annotated[int, Field(ge=1)]] = {}
    """Items per suite, at most; a limited score is marked so."""
    allow_unsandboxed: bool = False


class Margin(Part):
    """What a suite may lose: a drop in points of its metric, or a factor of its perplexity. Exactly one."""

    max_drop: Annotated[float, Field(ge=0, lt=1)] | None = None
    max_ratio: Annotated[float, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def one(self) -> Self:
        if (self.max_drop is None) == (self.max_ratio is None):
            raise ValueError("give exactly one of max_drop and max_ratio")
        return self


class AccuracyGate(Part):
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    required: dict[Name, Margin]
    reported: dict[Name, Margin] = {}


class Regime(Part):
    concurrency: Annotated[int, Field(ge=1)]
    min_ratio: Annotated[float, Field(gt=0)]
    """Output tokens per second of the variant over those of the source, at least."""
    requests: Annotated[int, Field(ge=1)] | None = None
    """None: 4 a stream, at least 8."""
    prompt_tokens: Annotated[int, Field(ge=1)] = 96
    output_tokens: Annotated[int, Field(ge=1)] = 48

    @property
    def count(self) -> int:
        return self.requests or max(8, 4 * self.concurrency)


class ThroughputGate(Part):
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    pairs: Annotated[int, Field(ge=3)] = 3
    regimes: Annotated[tuple[Regime, ...], Field(min_length=1)]


class Gates(Part):
    accuracy: AccuracyGate
    throughput: ThroughputGate | None = None


class Serve(Part):
    target: Name = "cpu"
    max_model_len: Annotated[int, Field(ge=16)] = 2048
    tensor_parallel: Annotated[int, Field(ge=1)] = 1


class Select(Part):
    objective: Literal["throughput", "size", "quality"] = "throughput"


class Publish(Part):
    registry: Literal["mlflow"] = "mlflow"
    uri: str = "sqlite"
    """'sqlite' is a database inside the runs folder; anything else is an MLflow tracking URI."""
    name: Name
    alias: Name = "champion"

    @field_validator("uri")
    @classmethod
    def _holds_no_secret(cls, uri: str) -> str:
        if re.search(r"://[^/@]*:[^/@]+@", uri):
            what = "a password in a recipe ends up in records: use MLFLOW_TRACKING_PASSWORD or the like"
            raise PydanticCustomError("secret", what)
        return uri


class Recipe(Part):
    name: Name
    model: Model
    calibration: Calibration = Calibration()
    variants: Annotated[dict[Name, Variant], Field(min_length=1)]
    evaluate: Evaluate | None = None
    gates: Gates | None = None
    serve: Serve = Serve()
    select: Select = Select()
    publish: Publish | None = None

    @classmethod
    def of(cls, document: Any) -> Recipe:
        """From plain data as YAML or JSON give it. Raises pydantic's ValidationError."""
        # Through JSON: strict mode then takes lists for tuples, and still refuses "4" for 4.
        return cls.model_validate_json(json.dumps(document))

    @property
    def digest(self) -> str:
        """sha256 of the resolved recipe: the identity of a run."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


def disagreements(recipe: Recipe, path: Path) -> list[Fault]:
    """What no single key shows: names that point nowhere, gates that contradict each other."""
    faults = []
    if "source" in recipe.variants:
        faults.append(
            Fault("'source' is the baseline's own name", f"{path}: variants.source", "call the variant otherwise")
        )
    suites = set(recipe.evaluate.suites) if recipe.evaluate else set()
    gates = recipe.gates.accuracy if recipe.gates else AccuracyGate(required={})
    named: dict[str, Mapping[str, object]] = {
        "gates.accuracy.required": gates.required,
        "gates.accuracy.reported": gates.reported,
        "evaluate.limit": recipe.evaluate.limit if recipe.evaluate else {},
    }
    for where, names in named.items():
        for suite in sorted(set(names) - suites):
            faults.append(
                Fault(
                    f"{suite} is not among evaluate.suites",
                    f"{path}: {where}.{suite}",
                    "add it there, or remove it here",
                )
            )
    for suite in sorted(set(gates.required) & set(gates.reported)):
        faults.append(Fault(f"{suite} is both required and reported", f"{path}: gates.accuracy", "keep one of the two"))
    if recipe.publish and not (recipe.gates and recipe.gates.accuracy.required):
        faults.append(
            Fault("nothing is published unjudged", f"{path}: publish", "add gates.accuracy.required, or remove publish")
        )
    return faults


def load(path: Path) -> Recipe:
    """Read and check a recipe file. Raises RecipeError with every fault of the file."""
    recipe, faults = read(path)
    if recipe is None or faults:
        raise RecipeError(*faults)
    return recipe


def read(path: Path) -> tuple[Recipe | None, tuple[Fault, ...]]:
    """The recipe with its faulty parts left out, and every fault, so that the plan can add its own to them.

    The recipe is None where too little is left to plan with.
    """
    try:
        document: Any = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)  # noqa: S506 - a SafeLoader with one more rule
        json.dumps(document)
    except FileNotFoundError:
        return None, (Fault("no such recipe", str(path), "give the path of a recipe; examples are in recipes/"),)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, TypeError, ValueError) as error:
        return None, (Fault(f"not readable as YAML: {error}", str(path), "correct the file"),)
    if not isinstance(document, dict):
        return None, (Fault("a recipe is a mapping of keys", str(path), "recipes/README.md lists the keys"),)
    faults: list[Fault] = []
    while True:
        try:
            recipe = Recipe.of(document)
            return recipe, (*faults, *disagreements(recipe, path))
        except ValidationError as error:
            details = error.errors()
        # What a pruned key leaves missing further up is no fault of the writer.
        faults += [_fault(path, detail) for detail in details if not faults or detail["type"] != "missing"]
        if not all([_prune(document, detail["loc"], detail["type"]) for detail in details]):
            return None, tuple(faults)


def _prune(document: Any, loc: tuple[int | str, ...], kind: str) -> bool:
    """Take the faulty entry out (a missing one: the mapping that misses it); False where nothing can be taken."""
    path = loc[:-1] if kind == "missing" else loc
    for depth in range(len(path), 0, -1):
        node = document
        try:
            for key in path[: depth - 1]:
                node = node[key]
            del node[path[depth - 1]]
            return True
        except (KeyError, IndexError, TypeError):
            continue
    return False


class _UniqueKeys(yaml.SafeLoader):
    """YAML lets a key stand twice and keeps the last; a recipe must not."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.MarkedYAMLError(problem=f"{', '.join(twice)} stands twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def _fault(path: Path, detail: Any) -> Fault:
    where = ".".join(str(part) for part in detail["loc"])
    kind, given = detail["type"], detail.get("input")
    if kind == "extra_forbidden":
        what, do = (
            f"unknown key '{detail['loc'][-1]}'",
            "remove it, or correct its spelling; recipes/README.md lists the keys",
        )
    elif kind == "missing":
        what, do = f"'{detail['loc'][-1]}' is missing", "add it"
    else:
        message = detail["msg"].removeprefix("Value error, ")
        shown = f" (given: {given!r})" if isinstance(given, str | int | float) and kind != "secret" else ""
        what, do = message + shown, "correct the value"
    return Fault(what, f"{path}: {where}" if where else str(path), do)
