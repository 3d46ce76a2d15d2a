"""BF16 products in float32: rounded once, in each variant, and undone; the choice of a process."""

import os
import subprocess

import pytest
import torch

from tests import forked_python

bf16_products = forked_python.bf16_products()

BF16 = torch.bfloat16
ROWS, INNER, COLUMNS, BATCH = 7, 150, 11, 3
SCALARS = {"": {}, "scaled": {"alpha": 0.3, "beta": 1.7}, "beta 0": {"beta": 0}}


@pytest.fixture
def in_float32():
    bf16_products.compute_in_float32()
    yield
    bf16_products.restore()
    if os.environ["TEST_BF16_PRODUCTS"] == "float32":
        bf16_products.compute_in_float32()


def once(operator, *tensors, **scalars):
    """The product of the same values in float32, rounded once."""
    return operator(*(tensor.float() for tensor in tensors), **scalars).bfloat16()


def operands(name: str, layout: str) -> list[torch.Tensor]:
    """BF16 arguments of an operator: a batch for ``bmm``, an addend before those of ``add``.

    The terms of a sum cancel each other but for what float32 rounds, so that another order of the
    sum, or another rounding, gives another result.
    """
    batch = (BATCH,) if "bmm" in name else ()
    inner, order = (0, []) if layout == "empty" else (INNER, torch.randperm(2 * INNER))
    a, b = torch.randn(*batch, ROWS, inner), torch.randn(*batch, inner, COLUMNS)
    a, b = torch.cat([a, -a], -1)[..., order], torch.cat([b, b], -2)[..., order, :]
    tensors = [a.to(BF16).contiguous(), b.to(BF16).contiguous()]
    if layout == "transposed":
        tensors = [tensor.mT.contiguous().mT for tensor in tensors]
    if name.startswith(("add", "badd")):
        tensors.insert(0, 1e-6 * torch.randn(*batch, ROWS, COLUMNS))
    return [tensor.to(BF16) for tensor in tensors]


@pytest.mark.parametrize("layout", ["plain", "transposed", "empty"])
@pytest.mark.parametrize("name", bf16_products.VARIANTS)
def test_every_variant_is_the_product_in_float32_rounded_once(name, layout, in_float32):
    operator, tensors = getattr(torch, name), operands(name, layout)
    for scalars in SCALARS.values() if len(tensors) == 3 else [{}]:
        want = once(operator, *tensors, **scalars)
        got = operator(*tensors, **scalars)
        assert got.is_contiguous()
        assert torch.equal(got, want)
        strided = torch.empty_like(want).mT.contiguous().mT
        for out in (torch.empty(0, dtype=BF16), torch.full_like(want, torch.nan), strided):
            assert operator(*tensors, **scalars, out=out) is out
            assert torch.equal(out, want)
        if len(tensors) == 3:
            addend = tensors[0].clone()
            assert getattr(addend, f"{name}_")(*tensors[1:], **scalars) is addend
            assert torch.equal(addend, want)


def test_restoring_gives_torchs_own_back(in_float32):
    tensors = operands("mm", "plain")
    bf16_products.restore()
    own = torch.mm(*tensors)
    bf16_products.compute_in_float32()
    bf16_products.compute_in_float32()
    bf16_products.restore()
    assert torch.equal(torch.mm(*tensors), own)


@pytest.mark.parametrize(("slowness", "choice"), [(1.9, "bf16"), (2.1, "float32")])
def test_the_time_decides_and_one_line_says_so(slowness, choice, in_float32, monkeypatch, capsys):
    bf16_products.restore()
    monkeypatch.setattr(bf16_products, "slowness", lambda: slowness)
    assert bf16_products.choose() == choice
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert f"{slowness} times as long" in printed
    for forced in ("float32", "bf16"):
        assert bf16_products.choose(forced) == forced
        assert bool(bf16_products._installed) == (forced == "float32")
        assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize("choice", ["bf16", "float32"])
def test_a_forked_process_computes_as_the_tests_environment_says(choice, forked_python):
    code = "import sys; print(bool(sys.modules['bf16_products']._installed))"
    environment = {**os.environ, "TEST_BF16_PRODUCTS": choice}
    run = subprocess.run(
        [forked_python, "-c", code], env=environment, capture_output=True, text=True
    )
    assert run.stdout.strip() == str(choice == "float32"), run.stderr
