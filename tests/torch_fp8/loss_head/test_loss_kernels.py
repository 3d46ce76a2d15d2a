"""The compiled kernels of softmax losses, emulated, equal their references."""

import functools

import pytest
import torch

from tests.emulator.counts import SECTOR, Counts
from tests.emulator.driver import emulated
from tests.emulator.on_card import card_module
from tests.emulator.races import Races
from tests.emulator.schedule import Shuffled
from tests.internals import kernels_cross_entropy as cross_entropy_kernels
from tests.kernel_cases.played import Call, check_played
from tests.torch_fp8.loss_head import loss_cases
from tests.torch_fp8.loss_head.loss_cases import BF16
from torch_fp8.ops import cross_entropy

pytestmark = pytest.mark.long
CARD = card_module(cross_entropy)


def watched():
    return [Races()]


@pytest.mark.parametrize(
    ("form", "kind"),
    [("plain", kind) for kind in loss_cases.TERMS] + [("scaled", "smooth"), ("capped", "weighted")],
)
def test_losses_and_gradients(form, kind):
    shapes = loss_cases.SHAPES[2:] if kind == "everything" else [(19, 1003)]
    with emulated(watch=watched, error_seed=1) as emulation:
        loss_cases.check_rows(CARD, "cpu", form, kind, shapes=shapes)
        loss_cases.check_quantize(CARD, "cpu", form, kind, shapes=shapes)
    assert len(emulation.launches) == 4 * len(shapes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_dtypes(dtype):
    with emulated():
        loss_cases.check_rows(CARD, "cpu", "capped", "everything", dtype, loss_cases.SHAPES[:1])
        loss_cases.check_quantize(CARD, "cpu", "plain", "plain", dtype, loss_cases.SHAPES[:1])


@pytest.mark.parametrize("wants", [(True, False, False), (False, True, False)], ids=str)
def test_one_layout(wants):
    with emulated():
        shapes = loss_cases.SHAPES[:2]
        loss_cases.check_quantize(CARD, "cpu", "plain", "plain", shapes=shapes, wants=wants)


def test_rows_of_several_blocks_in_a_random_order():
    """A row is overwritten by other threads than those that have read it."""
    with emulated(watch=watched, schedule=lambda: Shuffled(1)):
        loss_cases.check_rows(CARD, "cpu", "plain", "plain", shapes=((2, 9000),))
        loss_cases.check_quantize(CARD, "cpu", "plain", "plain", shapes=((70, 300),))


def test_a_logit_costs_six_bytes_of_traffic():
    """In BF16 two reads and a write; in FP8 a read for the sums, and one for both layouts."""
    form, scale = loss_cases.FORMS["plain"], torch.tensor(2.0**-15)

    def bytes_of(rows, cols, counted):
        terms, x = loss_cases.terms_of(rows, cols, "plain"), loss_cases.logits_of(rows, cols, BF16)
        with emulated(watch=lambda: [Counts()]) as emulation:
            counted(x, terms._replace(lse=torch.zeros(rows)), terms)
        ((counts,),) = (launched.watch for launched in emulation.launches)
        assert counts.sectors <= 1.01 * counts.least_sectors
        return SECTOR * counts.sectors / x.numel()

    def rows_of(gradient):
        return lambda x, _, terms: CARD.cross_entropy_rows(x, terms, form, gradient, False)

    def cast(x, terms, _):
        CARD.cross_entropy_quantize(x, terms, form, scale, True, True, False)

    assert 6 <= bytes_of(2, 16384, rows_of(True)) <= 6.2
    assert 6 <= bytes_of(2, 16384, rows_of(False)) + bytes_of(64, 512, cast) <= 6.2


def test_played_calls_make_and_write_the_same_bytes():
    def operands(lse=None):
        terms = loss_cases.terms_of(20, 100, "plain")
        known = None if lse is None else torch.zeros(20)
        return terms._replace(mass=terms.mass.clone(), lse=known)

    def logits():
        return loss_cases.logits_of(20, 100, BF16)

    form, scale = loss_cases.FORMS["plain"], functools.partial(torch.tensor, 2.0**-15)
    with emulated():
        for name, launcher, arguments in (
            ("losses", cross_entropy_kernels.cross_entropy_rows, (operands, form, True, False)),
            (
                "casts",
                cross_entropy_kernels.cross_entropy_quantize,
                (functools.partial(operands, 0), form, scale, True, True, True),
            ),
        ):
            check_played(Call(name, launcher, (logits, *arguments)))


def test_a_card_computes_the_head_as_the_cpu_does():
    """The launchers get what the head gives them; products run on the CPU."""
    from tests.torch_fp8.loss_head.heads import Head, decibels
    from torch_fp8 import linear_cross_entropy
    from torch_fp8.ops import head_products

    head = Head(tokens=40, classes=90)
    for precision in ("bf16", "fp8"):

        def compute(precision=precision):
            options = {"precision": precision, "chunk": 32, "label_smoothing": 0.1}
            return linear_cross_entropy(*head.tensors[:2], head.labels, head.bias, **options)

        want, want_grads = head.run(compute)
        with emulated(), pytest.MonkeyPatch.context() as patch:
            for name in ("cross_entropy_rows", "cross_entropy_quantize"):
                patch.setattr(head_products, name, getattr(CARD, name))
            loss, grads = head.run(compute)
        torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
        assert min(decibels(*pair) for pair in zip(grads, want_grads, strict=True)) >= 50
