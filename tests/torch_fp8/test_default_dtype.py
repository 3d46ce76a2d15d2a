import ast
import functools
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.steps import train_steps
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8

ROOT = Path(__file__).resolve().parents[2]
FACTORIES = {
    *("tensor", "as_tensor", "scalar_tensor", "full", "zeros", "ones", "empty", "empty_strided"),
    *("rand", "randn", "linspace", "logspace", "eye"),
}
APART = "env"  # runs in processes of its own


def _is_factory(call):
    function = call.func
    return (
        isinstance(function, ast.Attribute)
        and ast.unparse(function.value) == "torch"
        and function.attr in FACTORIES
    )


@pytest.mark.parametrize(
    "package", ["torch_fp8", "torch_fp8_tools", "lightning_fp8", "accelerate_fp8"]
)
def test_every_new_tensor_names_its_dtype(package):
    without = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / package).rglob("*.py"))
        if APART not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and _is_factory(node)
        if not any(keyword.arg in ("dtype", None) for keyword in node.keywords)
    ]
    assert without == []


class Model(nn.Module):
    """An embedding, both norms and a gated MLP, in float32 whatever the default."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(96, 64)
        self.norm, self.rms_norm = nn.LayerNorm(64), nn.RMSNorm(64)
        self.gate, self.up, self.down = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, tokens):
        x = self.rms_norm(self.norm(self.embedding(tokens)))
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def _loss(model, step):
    with torch.autocast("cpu", torch.bfloat16):
        return model(torch.arange(step, step + 32)).float().square().mean()


def _trained(dtype, converted_before, **options):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = FP8Config(monitor=1, **options)

    def convert():
        convert_to_float8(model, config)
        convert_optimizer(optimizer, config, model=model)

    if converted_before:
        convert()
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        if not converted_before:
            convert()
        train_steps(model, optimizer, 3, loss_of=_loss)
        return [p.detach().clone() for p in model.parameters()]
    finally:
        torch.set_default_dtype(default)


@functools.cache
def _trained_in_float32(converted_before, level, recipe):
    return _trained(torch.float32, converted_before, opt_level=level, recipe=recipe)


@pytest.mark.parametrize("converted_before", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_training_does_not_depend_on_it(level, recipe, dtype, converted_before):
    expected = _trained_in_float32(converted_before, level, recipe)
    actual = _trained(dtype, converted_before, opt_level=level, recipe=recipe)
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))
