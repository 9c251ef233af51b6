"""Laws of what is kept of an input."""

from __future__ import annotations

import pytest
import torch

from quantkit.calibrate.statistics import Gathering, finish_all
from quantkit.errors import SolveError


def inputs(samples: int = 6, length: int = 10, columns: int = 300) -> torch.Tensor:
    return torch.randn(samples, length, columns, generator=torch.Generator().manual_seed(0)).bfloat16()


def gather(*batches: torch.Tensor) -> Gathering:
    gathering = Gathering(batches[0].shape[-1])
    for batch in batches:
        gathering.add(batch)
    return gathering


def test_statistics_are_means_by_their_definition() -> None:
    seen = inputs()
    found = gather(seen).finish("x")
    flat = seen.flatten(0, 1).double()
    torch.testing.assert_close(found.gram_II.double(), flat.T @ flat / 60, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.mean_abs_I.double(), flat.abs().mean(0), rtol=1e-5, atol=1e-6)
    assert torch.equal(found.max_abs_I.double(), flat.abs().amax(0)) and found.tokens == 60
    assert torch.equal(found.gram_II, found.gram_II.T)


def test_how_samples_are_batched_does_not_matter() -> None:
    seen = inputs()
    whole, parts = gather(seen).finish("x"), gather(*seen.split([1, 3, 2])).finish("x")
    torch.testing.assert_close(whole.gram_II, parts.gram_II, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(whole.mean_abs_I, parts.mean_abs_I, rtol=1e-6, atol=0)
    assert whole.tokens == parts.tokens


def test_changing_the_first_sample_changes_the_statistics() -> None:
    seen = inputs()
    changed = seen.clone()
    changed[0] *= 2
    before, after = gather(*seen).finish("x"), gather(*changed).finish("x")
    assert not torch.equal(before.gram_II, after.gram_II) and not torch.equal(before.mean_abs_I, after.mean_abs_I)


def test_inputs_that_are_not_finite_or_never_came_are_refused_by_name() -> None:
    broken = inputs()
    broken[2, 3, 4] = torch.inf
    with pytest.raises(SolveError, match=r"model\.layers\.7\.mlp"):
        gather(broken).finish("model.layers.7.mlp")
    with pytest.raises(SolveError, match=r"no token.*\n.*here"):
        Gathering(4).finish("here")


def test_the_precision_of_other_products_stays() -> None:
    before = torch.get_float32_matmul_precision()
    gather(inputs())
    assert torch.get_float32_matmul_precision() == before


def test_an_expert_that_few_tokens_reached_stands_on_what_all_saw() -> None:
    seen = inputs(samples=5, length=20, columns=40)
    tokens = {"a": seen[:3], "b": seen[3:, :2], "c": seen[:0], "other": seen[:, :1] * 9}
    gatherings = {name: Gathering(40) for name in tokens}
    for name, part in tokens.items():
        if len(part):
            gatherings[name].add(part)
    found = finish_all(gatherings, ["a", "b", "c"], "x.")
    assert {name: known.tokens for name, known in found.items()} == {"a": 60, "b": 4, "c": 0, "other": 5}
    for name in ("a", "other"):
        assert torch.equal(found[name].gram_II, gather(tokens[name]).finish("x").gram_II)
    flat = torch.cat([seen[:3].flatten(0, 1), seen[3:, :2].flatten(0, 1)]).double()
    for name in ("b", "c"):
        torch.testing.assert_close(found[name].gram_II.double(), flat.T @ flat / 64, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[name].mean_abs_I.double(), flat.abs().mean(0), rtol=1e-5, atol=1e-6)
        assert torch.equal(found[name].max_abs_I.double(), flat.abs().amax(0))
    with pytest.raises(SolveError, match=r"no token.*\n.*x\.other"):
        finish_all(gatherings | {"other": Gathering(40)}, ["a", "b", "c"], "x.")
