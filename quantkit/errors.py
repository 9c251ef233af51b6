"""Everything that quantkit refuses, as one tree. Each error carries faults: what, where, do what.

QuantkitError
├── RecipeError     2    the recipe cannot be read, or says something impossible
├── PlanError       3    the recipe is sound, but this model, target or machine cannot do it
├── SolveError      4    calibration or solving went wrong
├── ArtifactError   5    a checkpoint or artifact on disk is not what it claims to be
├── ToolError       6    a job in a tool environment failed
├── GateError       7    records that cannot be compared (a verdict of "no" is not an error)
└── PublishError    8    the registry refused, or what came back was not what was sent
"""

from __future__ import annotations

from dataclasses import dataclass

EXIT_DONE = 0
EXIT_GATE_FAILED = 7
EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong, in the three parts that a reader needs."""

    what: str
    where: str
    do: str

    def __str__(self) -> str:
        return f"{self.what}\n  where  {self.where}\n  do     {self.do}"


class QuantkitError(Exception):
    """One or more faults; `exit_code` is what the command ends with."""

    exit_code = 1

    def __init__(self, *faults: Fault) -> None:
        super().__init__("\n".join(map(str, faults)))
        self.faults = faults


class RecipeError(QuantkitError):
    exit_code = 2


class PlanError(QuantkitError):
    exit_code = 3


class SolveError(QuantkitError):
    exit_code = 4


class ArtifactError(QuantkitError):
    exit_code = 5


class ToolError(QuantkitError):
    exit_code = 6


class GateError(QuantkitError):
    exit_code = 7


class PublishError(QuantkitError):
    exit_code = 8
