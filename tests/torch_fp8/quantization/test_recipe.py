import pytest

from tests.internals import RECIPES, make_recipe


def _described(name, **options):
    recipe = make_recipe(name, **options)
    return [
        (g.a.format.name, g.a.granularity, g.b.format.name, g.b.granularity) for g in recipe.gemms
    ]


def test_presets_are_spelled_out():
    tensor = "tensorwise"
    gradient = ("e5m2", tensor, "e4m3", tensor)
    assert _described(tensor) == [("e4m3", tensor, "e4m3", tensor), gradient, gradient]
    assert _described("delayed") == _described(tensor)
    assert [name for name in RECIPES if make_recipe(name).delayed] == ["delayed"]
    assert _described("rowwise") == [("e4m3", "rowwise", "e4m3", "rowwise")] * 3
    line, square = "block_1x128", "block_128x128"
    assert _described("blockwise") == [
        ("e4m3", line, "e4m3", square),
        ("e4m3", line, "e4m3", square),
        ("e4m3", line, "e4m3", line),
    ]
    assert _described("mxfp8") == [("e4m3", "block_1x32", "e4m3", "block_1x32")] * 3


@pytest.mark.parametrize("name", RECIPES)
def test_wgrad_bf16_drops_one_gemm(name):
    recipe = make_recipe(name, wgrad="bf16")
    assert recipe.wgrad is None
    assert recipe.fprop == make_recipe(name).fprop
    assert len(recipe.gemms) == 2


def test_fast_accumulation_is_forward_only_by_default_and_absent_for_blocks():
    assert [g.fast_accum for g in make_recipe("tensorwise").gemms] == [True, False, False]
    chosen = make_recipe("rowwise", fast_accum=("dgrad", "wgrad"))
    assert [g.fast_accum for g in chosen.gemms] == [False, True, True]
    assert not any(g.fast_accum for n in ("blockwise", "mxfp8") for g in make_recipe(n).gemms)


def test_grad_format_changes_gradients_alone():
    recipe = make_recipe("tensorwise", grad_format="e4m3")
    assert recipe.grad_output.format.name == "e4m3"
    assert recipe.fprop == make_recipe("tensorwise").fprop
