"""Reopen an artifact and compare it with what was solved: names, codes, and every tensor that nobody touched."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from quantkit.checkpoint.index import read_index
from quantkit.checkpoint.read import Weights
from quantkit.engines.codes import unpack_module
from quantkit.engines.variant import digest
from quantkit.errors import ArtifactError, Fault
from quantkit.pack import FORMATS
from quantkit.records import Index, VariantPlan

_AGAIN = "delete the variant's folder and run the command again; if it stays, report it"


def expected_names(index: Index, variant: VariantPlan) -> set[str]:
    """The tensors that the artifact holds, from those of the source alone."""
    ends = FORMATS[variant.format].suffixes(variant)
    names = set(index.tensors) - {f"{module.name}.weight" for module in variant.modules}
    return names | {f"{module.name}.{end}" for module in variant.modules for end in ends}


def verify_artifact(
    folder: Path, source: Index, variant: VariantPlan, digests: Mapping[str, str], changed: set[str]
) -> None:
    """Raises ArtifactError naming every tensor that is not what it must be.

    Args:    digests: by module, as `engines.variant.digest` gave them when solved. changed: names of the tensors
             that folding altered; all others of the source are compared with it byte for byte.
    """
    made = read_index(folder, quantized_ok=True)
    expected = expected_names(source, variant)
    faults = [Fault(f"{name} is missing", str(folder), _AGAIN) for name in sorted(expected - set(made.tensors))]
    faults += [
        Fault(f"{name} belongs to nothing", str(folder), _AGAIN) for name in sorted(set(made.tensors) - expected)
    ]
    if faults:
        raise ArtifactError(*faults)
    with Weights(made) as stored, Weights(source) as original:
        for module in variant.modules:
            if digest(unpack_module(stored, module.name, variant.format)) != digests.get(module.name):
                faults.append(Fault(f"{module.name} differs from what was solved", str(folder), _AGAIN))
        for name in sorted((set(source.tensors) & expected) - changed - {f"{m.name}.weight" for m in variant.modules}):
            left, right = stored.get(name), original.get(name)
            same = left.dtype == right.dtype and left.shape == right.shape
            if not same or not torch.equal(left.view(torch.uint8), right.view(torch.uint8)):
                faults.append(Fault(f"{name} differs from the source", str(folder), _AGAIN))
    if faults:
        raise ArtifactError(*faults)
