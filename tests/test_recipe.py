"""A recipe says all that is wrong with it, at once, and nothing is guessed."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from quantkit.errors import RecipeError
from quantkit.recipe import FORMATS_OF_METHOD, Recipe, Variant, load, read

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_shipped_recipes_are_sound(path: Path) -> None:
    assert load(path).name == path.stem


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_a_recipe_survives_its_own_dump(path: Path) -> None:
    recipe = load(path)
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    assert Recipe.model_validate_json(recipe.model_dump_json()).digest == recipe.digest


def test_every_fault_is_told_at_once(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
name: mine
model: {source: somewhere}
calibration: {set: python-docs, lenght: 512}
variants:
  a: {method: awk}
  b: {method: gptq, bits: "4"}
  c: {method: gptq, format: awq}
evaluate: {suites: [perplexity]}
gates: {accuracy: {required: {perplexity: {max_ratio: 1.1}}, reported: {mmlu: {max_drop: 0.1}}}}
""",
    )
    recipe, faults = read(path)
    text = "\n".join(map(str, faults))
    for part in ("calibration.lenght", "variants.a.method", "variants.b.bits", "variants.c", "reported.mmlu"):
        assert part in text
    assert len(faults) == 5
    assert recipe is not None and set(recipe.variants) == {"b"}
    with pytest.raises(RecipeError):
        load(path)


@pytest.mark.parametrize("text", ["", "[]", "name: [", "name: x\nname: y", "{1: 2}", "name: 2026-01-01", "\tx: y"])
def test_what_is_no_recipe_is_one_clear_refusal(tmp_path: Path, text: str) -> None:
    recipe, faults = read(written(tmp_path, text))
    assert recipe is None and faults
    assert all(fault.what and fault.where and fault.do for fault in faults)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from([*Recipe.model_fields, "awq", "method"]), inner, max_size=5)
        ),
        max_leaves=20,
    )
)
def test_any_yaml_is_either_a_recipe_or_faults(tmp_path_factory: pytest.TempPathFactory, document: object) -> None:
    recipe, faults = read(written(tmp_path_factory.mktemp("any"), yaml.safe_dump(document)))
    assert recipe is not None or faults


@pytest.mark.parametrize("method", FORMATS_OF_METHOD)
def test_a_variant_takes_just_the_formats_that_load(method: str) -> None:
    for format in ("awq", "gptq", "compressed-tensors"):
        if format in FORMATS_OF_METHOD[method]:
            assert Variant.model_validate({"method": method, "format": format}).format == format
        else:
            with pytest.raises(ValueError, match="cannot hold"):
                Variant.model_validate({"method": method, "format": format})


@pytest.mark.parametrize(("format", "symmetric"), [("awq", True), ("gptq", False)])
def test_symmetry_that_vllm_refuses_is_refused(format: str, symmetric: bool) -> None:
    with pytest.raises(ValueError, match="only"):
        Variant.model_validate({"method": "rtn", "format": format, "symmetric": symmetric})


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"method": "awq", "bits": 8}, "4 bits only"),
        ({"method": "awq", "bits": 8, "format": "compressed-tensors"}, "4 bits only"),
        ({"method": "gptq", "bits": 8, "format": "gptq"}, "use compressed-tensors"),
        ({"method": "rtn", "bits": 8, "format": "awq"}, "use compressed-tensors"),
        ({"method": "fp8", "bits": 4}, "eight bits"),
        ({"method": "int8", "group_size": 64}, "no groups"),
        ({"method": "fp8", "symmetric": False}, "only symmetric"),
        ({"method": "int8", "scheme": "static"}, "dynamic only"),
        ({"method": "int8", "scheme": "block"}, "dynamic only"),
        ({"method": "gptq", "scheme": "dynamic"}, "methods fp8 and int8"),
        ({"method": "gptq", "group_size": 0}, "no kernel"),
        ({"method": "gptq", "group_size": 33}, "no kernel"),
        ({"method": "gptq", "rounding": "nearest"}, "AWQ-scaled"),
        ({"method": "gptq", "bits": 3}, "should be 4 or 8"),
        ({"method": "fp8", "format": "awq"}, "cannot hold"),
    ],
)
def test_what_no_loader_reads_is_refused_with_the_reason(wrong: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Variant.model_validate(wrong)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"method": "gptq", "bits": 8}, ("compressed-tensors", 8, 128, True, None)),
        ({"method": "rtn", "bits": 8, "symmetric": False}, ("compressed-tensors", 8, 128, False, None)),
        ({"method": "gptq", "format": "compressed-tensors"}, ("compressed-tensors", 4, 128, False, None)),
        ({"method": "rtn", "group_size": -1}, ("awq", 4, -1, False, None)),
        ({"method": "int8"}, ("compressed-tensors", 8, None, True, "dynamic")),
        ({"method": "fp8", "scheme": "block"}, ("compressed-tensors", 8, None, True, "block")),
        ({"method": "fp8", "scheme": "static"}, ("compressed-tensors", 8, None, True, "static")),
    ],
)
def test_what_a_variant_leaves_out_is_what_its_method_implies(
    asked: dict[str, object], expected: tuple[object, ...]
) -> None:
    made = Variant.model_validate(asked)
    assert (made.format, made.bits, made.group_size, made.symmetric, made.scheme) == expected
    assert Variant.model_validate_json(made.model_dump_json()) == made
