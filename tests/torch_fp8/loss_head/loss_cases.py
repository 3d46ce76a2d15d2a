"""Cases of the kernels of softmax losses, on a card or in the emulator, and what they launch."""

import itertools

import torch

from tests.internals import LogitForm, LossTerms
from tests.kernel_cases.comparison import NEIGHBOURS, close, near, require
from torch_fp8.ops import cross_entropy

BF16 = torch.bfloat16
FORMS = {
    "plain": LogitForm(),
    "scaled": LogitForm(0.5, 0.0, 1.5),
    "capped": LogitForm(1.0, 10.0, 1.0),
}
TERMS = ("plain", "smooth", "weighted", "spread", "everything")
"""What a loss has: label smoothing, weights of classes, a gradient of the entropy, or all."""
SHAPES = ((37, 1003), (64, 576), (1, 1), (3, 40))
"""Parts of a block and of tiles, whole tiles, one element, and fewer columns than a warp reads."""


def terms_of(rows, cols, kind, seed=0):
    """Return random factors of tokens, of which the first has no label; without lse."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.rand(shape, generator=generator)

    label = torch.randint(cols, (rows,), generator=generator)
    label[: rows // 2 : 5] = -1
    hit = rand(rows) * (label >= 0)
    terms = LossTerms(label, hit, hit)
    if kind in ("smooth", "weighted", "everything"):
        terms = terms._replace(mass=1.25 * hit, smooth=0.25 * hit / cols)
    if kind in ("weighted", "everything"):
        terms = terms._replace(class_weight=2 * rand(cols))
    if kind in ("spread", "everything"):
        terms = terms._replace(spread=rand(rows) - 0.5)
    return terms


def logits_of(rows, cols, dtype, seed=0):
    """Return logits of several magnitudes, in rows that start at multiples of 16 elements."""
    generator = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(rows, -(-cols // 16) * 16, generator=generator)
    x *= 2.0 ** torch.randint(-4, 5, (rows, 1), generator=generator)
    return x.to(dtype)[:, :cols]


def on(device, values):
    """Return tensors on a device, and what is no tensor, in a tuple of the same class."""
    moved = (x.to(device) if isinstance(x, torch.Tensor) else x for x in values)
    return type(values)(*moved)


def _known(x, terms, form):
    _, lse, entropy = cross_entropy.cross_entropy_rows.reference(
        x.clone(), terms, form, False, terms.spread is not None
    )
    return terms._replace(lse=lse, entropy=entropy)


def check_rows(ops, device, form, kind, dtype=BF16, shapes=SHAPES):
    """Check losses and gradients in one launch, losses alone, and gradients of a known lse."""
    form, reference = FORMS[form], cross_entropy.cross_entropy_rows.reference
    for rows, cols in shapes:
        terms, x = terms_of(rows, cols, kind), logits_of(rows, cols, dtype)
        first = terms._replace(spread=None)
        runs = [
            (first, True, False),
            (first, False, kind != "smooth"),
            (_known(x, terms, form), True, False),
        ]
        for given, gradient, entropy in runs:
            want_x, got_x = x.clone(), x.to(device).clone()
            wants = reference(want_x, given, form, gradient, entropy)
            results = ops.cross_entropy_rows(got_x, on(device, given), form, gradient, entropy)
            what = f"{rows} x {cols}, {kind}, {gradient=}"
            if dtype == torch.float16:  # whose small gradients are denormal
                least = 2e-3 * want_x.float().abs().amax()
                close(got_x.cpu().float() + least, want_x.float() + least, 0.01, what)
            elif dtype == torch.float32:  # p * mass - hit may cancel
                least = given.mass.abs()[:, None] + 1e-3
                close(got_x.cpu() + least, want_x + least, 1e-4, what)
            else:
                near(got_x, want_x, f"gradient, {what}")
            for name, got, want in zip(("loss", "lse", "entropy"), results, wants, strict=True):
                require((want is None) == (got is None or not len(got)), f"{name}, {what}")
                if want is not None:  # a difference of numbers as large as the logits
                    shift = want.abs().amax() + x.float().abs().amax() + 1
                    close(got.cpu() + shift, want + shift, 2e-6, f"{name}, {what}")


def check_quantize(ops, device, form, kind, dtype=BF16, shapes=SHAPES, wants=(True, True, True)):
    """Check payloads in both layouts, sums of rows and columns, and the labels' gradients."""
    form, scale = FORMS[form], torch.tensor(2.0**-14)
    for rows, cols in shapes:
        x = logits_of(rows, cols, dtype)
        terms = _known(x, terms_of(rows, cols, kind), form)
        options = (form, scale.to(device), *wants)
        results = ops.cross_entropy_quantize(x.to(device), on(device, terms), *options)
        expected = cross_entropy.cross_entropy_quantize.reference(x, terms, form, scale, *wants)
        what = f"{rows} x {cols}, {kind}"
        for name, got, want in zip(("row", "column"), results[:2], expected[:2], strict=True):
            require((want is None) == (got is None or not got.numel()), f"{name}, {what}")
            if want is None:
                continue
            require(got.shape == want.shape, f"{name}, {what}: {tuple(got.shape)}")
            differ = got.cpu().float() != want.float()
            require(float(differ.float().mean()) <= NEIGHBOURS, f"{name}, {what}: codes differ")
        for name, got, want in zip(("sums", "bias"), results[2:], expected[2:], strict=True):
            require((want is None) == (got is None or not got.numel()), f"{name}, {what}")
            if want is not None:
                shift = want.abs().amax() + 1
                close(got.cpu() + shift, want + shift, 2e-6, f"{name}, {what}")


def check_everything(ops, device, dtypes=(BF16,), shapes=SHAPES[:1]):
    """Check each form with each kind of loss, in both operators."""
    for form, kind, dtype in itertools.product(FORMS, TERMS, dtypes):
        check_rows(ops, device, form, kind, dtype, shapes)
        check_quantize(ops, device, form, kind, dtype, shapes)


def chosen(dtype, cols):
    """Return the forms and kinds of loss for which each choice of the kernels is compiled.

    An odd number of columns changes how a row is read, whatever the loss: one will do.
    """
    if cols % 16:
        return [("plain", "plain")]
    if dtype != BF16:
        return [("plain", "plain"), ("capped", "everything")]
    others = itertools.product(("scaled", "capped"), ("plain", "everything"))
    return [*(("plain", kind) for kind in TERMS), *others]


def layouts_of(form, kind):
    """Return what is asked of a cast: rows, columns, and sums for a bias."""
    if (form, kind) == ("plain", "plain"):
        return [(True, True, False), (True, False, False), (True, True, True)]
    return [(True, True, kind == "everything")]


def check_chosen(ops, device, form, kind, dtype, cols):
    """Check what `launch_losses` launches of a form and a kind."""
    check_rows(ops, device, form, kind, dtype, [(2, cols)])
    for wants in layouts_of(form, kind):
        check_quantize(ops, device, form, kind, dtype, [(2, cols)], wants)


def launch_losses(module, dtype, cols=1024):
    """Launch each choice of the kernels that the head makes."""
    x, one = logits_of(48, cols, dtype), torch.ones(())
    for form, kind in chosen(dtype, cols):
        terms = terms_of(48, cols, kind)
        first, known = terms._replace(spread=None), terms._replace(lse=one.expand(48).clone())
        if known.spread is not None:
            known = known._replace(entropy=known.lse)
        module.cross_entropy_rows(x, first, FORMS[form], True, False)
        module.cross_entropy_rows(x, first, FORMS[form], False, kind != "smooth")
        module.cross_entropy_rows(x, known, FORMS[form], True, False)
        for wants in layouts_of(form, kind):
            module.cross_entropy_quantize(x, known, FORMS[form], one, *wants)
