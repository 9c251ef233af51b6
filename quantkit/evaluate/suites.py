"""A suite: one YAML of evals/ says what is asked, how, and what guessing would give. No torch here."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from quantkit import paths
from quantkit.errors import Fault, QuantkitError, RecipeError
from quantkit.evaluate import items, sandbox

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]
Count = Annotated[int, Field(ge=1)]


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Common(Part):
    name: Name
    about: str
    licence: str
    """Of the data."""
    limit: Count | None = None
    """The first items only; a recipe may lower it. None: all."""


class Task(Common):
    """What lm-eval runs: `task` at `version`, from quantkit/evaluate/tasks or, with hub, from lm-eval itself."""

    task: str
    version: float
    hub: bool = False
    """The items come from the Hugging Face hub; otherwise from an installed package."""
    parts: Count = 1
    """Tasks of a group; a limit is shared out among them."""
    shots: Annotated[int, Field(ge=0)] = 0
    template: bool = False
    """Whether the chat template is applied."""
    seed: int = 0
    batch: Count = 16
    """Prompts that the model sees at once."""
    metric: str
    chance: Annotated[float, Field(ge=0, lt=1)] | None = None
    """The score of guessing."""


class ChoiceSuite(Task):
    """The choice whose log-likelihood is highest is the answer."""

    kind: Literal["choice"]


class Generation(Part):
    max_gen_toks: Count
    until: tuple[str, ...]
    """The answer ends before the first of these."""


class Limits(Part):
    """What one generated program may use."""

    cpu_seconds: Count = 5
    wall_seconds: Count = 15
    memory_mb: Count = 512

    def to_sandbox(self) -> sandbox.Limits:
        return sandbox.Limits(self.cpu_seconds, self.wall_seconds, self.memory_mb)


class CodeSuite(Task):
    """Greedy completions; the task's own tests run in the sandbox."""

    kind: Literal["code"]
    generation: Generation
    sandbox: Limits = Limits()


class PerplexitySuite(Common):
    """Next-token loss over windows of text, and how far the variant's distribution is from the source's."""

    kind: Literal["perplexity"]
    text: str
    """'held-out': the part of the calibration set that is kept from calibration. Otherwise the path of a text file."""
    windows: Count
    length: Annotated[int, Field(ge=8)]
    """Tokens a window."""


Suite = Annotated[ChoiceSuite | CodeSuite | PerplexitySuite, Field(discriminator="kind")]
_SUITE: TypeAdapter[ChoiceSuite | CodeSuite | PerplexitySuite] = TypeAdapter(Suite)


def load_suite(name: str) -> ChoiceSuite | CodeSuite | PerplexitySuite:
    """The suite `name` of evals/, or the one in the file of that path. Raises RecipeError with every fault."""
    path = paths.find_data("evals", name)
    if path is None:
        known = ", ".join(paths.known_data("evals"))
        raise RecipeError(Fault(f"no suite called {name}", "evals/", f"use one of {known}, or write evals/{name}.yaml"))
    try:
        document: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        suite = _SUITE.validate_json(TypeAdapter(Any).dump_json(document))
    except (OSError, yaml.YAMLError) as error:
        raise RecipeError(Fault(f"not readable as YAML: {error}", str(path), "correct the file")) from None
    except ValidationError as error:
        raise RecipeError(*(_fault(path, detail) for detail in error.errors())) from None
    if suite.name != path.stem:
        do = f"name: {path.stem}, or another file name"
        raise RecipeError(Fault(f"the suite calls itself {suite.name}", f"{path}: name", do))
    return suite


def check_suite(name: str, allow_unsandboxed: bool = False) -> list[Fault]:
    """Everything that would stop this suite, found without a model: its YAML, its data, the sandbox."""
    try:
        suite = load_suite(name)
        if isinstance(suite, CodeSuite):
            sandbox.find_guard(allow_unsandboxed)
        if isinstance(suite, PerplexitySuite):
            if suite.text != "held-out" and not Path(suite.text).is_file():
                return [Fault(f"no such text file: {suite.text}", f"{name}: text", "correct the path, or say held-out")]
        elif not suite.hub:
            items.read(suite.task)
        elif find_spec("datasets") is None:
            return [Fault("the package datasets is missing", name, "pip install datasets")]
    except QuantkitError as error:
        return list(error.faults)
    return []


def _fault(path: Path, detail: Any) -> Fault:
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return Fault(f"unknown key '{detail['loc'][-1]}'", f"{path}: {where}", "remove it, or correct its spelling")
    return Fault(detail["msg"], f"{path}: {where}", "correct the value; evals/README.md lists the keys")
