"""The compiled kernels of softmax losses, emulated, equal their references."""

import pytest
import torch

from tests.emulator.counts import SECTOR, Counts
from tests.emulator.driver import emulated
from tests.emulator.on_card import card_module
from tests.emulator.races import Races
from tests.emulator.schedule import Shuffled
from tests.torch_fp8.loss_head import loss_cases
from tests.torch_fp8.loss_head.loss_cases import BF16
from torch_fp8.ops import cross_entropy

pytestmark = pytest.mark.long
CARD = card_module(cross_entropy)


def watched():
    return [Races()]


@pytest.mark.parametrize("kind", loss_cases.TERMS)
@pytest.mark.parametrize("form", loss_cases.FORMS)
def test_losses_and_gradients(form, kind):
    shapes = loss_cases.SHAPES if kind == "everything" else loss_cases.SHAPES[:1]
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
    """In BF16 two reads and a write; in FP8 a read for the sums, and one for both layouts.

    A payload in the row layout is read again by the threads that have just stored it, from a cache.
    """
    form, scale = loss_cases.FORMS["plain"], torch.tensor(2.0**-15)

    def bytes_of(rows, cols, counted):
        terms, x = loss_cases.terms_of(rows, cols, "plain"), loss_cases.logits_of(rows, cols, BF16)
        with emulated(watch=lambda: [Counts()]) as emulation:
            counted(x, terms._replace(lse=torch.zeros(rows)), terms)
        ((counts,),) = (launched.watch for launched in emulation.launches)
        assert counts.sectors <= 1.01 * counts.least_sectors
        return SECTOR * counts.sectors / x.numel(), counts.needed / x.numel() - 1

    def rows_of(gradient):
        return lambda x, _, terms: CARD.cross_entropy_rows(x, terms, form, gradient, False)

    def cast(x, terms, _):
        CARD.cross_entropy_quantize(x, terms, form, scale, True, True, False)

    bf16, _ = bytes_of(4, 32768, rows_of(True))
    statistics, _ = bytes_of(4, 32768, rows_of(False))
    _, of_cast = bytes_of(64, 2048, cast)
    assert 6 <= bf16 <= 6.2
    assert 6 <= statistics + of_cast <= 6.2


def test_a_card_computes_the_head_as_the_cpu_does():
    """The launchers get what the head gives them; products run on the CPU."""
    from tests.torch_fp8.loss_head.heads import Head, decibels
    from torch_fp8.nn.loss_head import linear_cross_entropy
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
