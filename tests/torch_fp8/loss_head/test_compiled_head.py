"""The head in graphs of torch.compile, and what `torch.library.opcheck` asks of its operators."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.internals import LogitForm, LossTerms, split_parameter
from tests.torch_fp8.loss_head.heads import BF16, Head
from torch_fp8 import linear_cross_entropy, linear_log_probs
from torch_fp8.ops.linear_cross_entropy import HeadOptions

CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")


def terms_of(head, **options):
    labels = head.labels.clamp(min=-1)
    ones = (labels >= 0).float()
    return LossTerms(labels, ones, ones, **options)


@pytest.mark.parametrize("fp8", [False, True])
def test_operators_are_well_formed(fp8):
    head, ops = Head(tokens=20, classes=40), torch.ops.torch_fp8
    terms, form = terms_of(head), LogitForm(2.0, 5.0, 1.5)
    options = HeadOptions(BF16, -1, fp8, True, True, True, True, True, 16)
    tensors = [t.detach() for t in (head.hidden, head.weight)]
    arguments = (*tensors, None, head.bias.detach(), *terms, *form, *options)
    torch.library.opcheck(ops.linear_softmax_loss.default, arguments, test_utils=CHECKS)
    logits = torch.randn(20, 40).to(BF16)
    rows = (logits, *terms, *form, True, True)
    torch.library.opcheck(ops.cross_entropy_rows.default, rows, test_utils=CHECKS)
    terms = terms._replace(lse=logits.float().logsumexp(1))
    cast = (logits, *terms, *form, torch.tensor(2.0**-15), True, True, True)
    torch.library.opcheck(ops.cross_entropy_quantize.default, cast, test_utils=CHECKS)


def test_flops_are_those_of_the_products():
    head, product = Head(), 2 * 100 * 64 * 1000
    tensors = *head.tensors[:2], head.labels
    for compute, products in (
        (lambda: linear_cross_entropy(*tensors).backward(), 3),
        (lambda: linear_cross_entropy(tensors[0], tensors[1].detach(), tensors[2]), 2),
        (lambda: linear_log_probs(*tensors[:2], tensors[2].clamp(0)).sum().backward(), 4),
    ):
        with FlopCounterMode(display=False) as flops:
            compute()
        assert flops.get_total_flops() == products * product


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("split", [False, True])
def test_a_graph_has_the_same_loss_and_gradients(precision, split):
    torch._dynamo.reset()
    head = Head(dtype=torch.float32)
    head.weight = torch.nn.Parameter(head.weight.detach())
    if split:
        split_parameter(head.weight)
    options = {"precision": precision, "chunk": 48}

    def compute(hidden, weight, labels):
        with torch.autocast("cpu", torch.bfloat16):
            smoothed = linear_cross_entropy(hidden, weight, labels, label_smoothing=0.1, **options)
            log_p, entropy = linear_log_probs(
                hidden, weight, labels.clamp(min=0), entropy=True, **options
            )
        return smoothed + (log_p + entropy).mean()

    results = []
    for run in (compute, torch.compile(compute, fullgraph=True, backend="aot_eager")):
        tensors = head.hidden, head.weight
        loss = run(*tensors, head.labels)
        results.append((loss, *torch.autograd.grad(loss, tensors)))
    for eager, compiled in zip(*results, strict=True):
        # A graph's gradient of a weight in two halves is BF16.
        torch.testing.assert_close(compiled, eager.to(compiled.dtype), rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_one_graph_serves_batches_of_every_length():
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def compute(hidden, weight, labels):
        return linear_cross_entropy(hidden, weight, labels)

    for tokens in (100, 64, 4100):
        head = Head(tokens=tokens, classes=48)
        got = compute(head.hidden, head.weight, head.labels)
        assert torch.equal(got, linear_cross_entropy(head.hidden, head.weight, head.labels))
    assert len(graphs) == 1
