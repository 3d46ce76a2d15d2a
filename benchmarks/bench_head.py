"""An output layer with its loss, forward and backward, and log-probabilities with entropies.

    python -m benchmarks.bench_head            # on a GPU; runs/benchmarks/head.csv
    python -m benchmarks.bench_head --toy      # small sizes, also on a CPU

The sizes are those of Llama-3.2-1B at 16,384 tokens, Llama-3.1-8B at 8,192, and GRPO's logits,
(8, 1024, 151,936). Variants are interleaved in this process:

* ``stock``: ``F.cross_entropy`` of all BF16 logits, upcast to float32, as transformers does;
* ``torch``: ``F.linear_cross_entropy`` in chunks; ``Liger`` and ``TRL``: their fused losses;
* ``ours, BF16`` and ``ours, FP8``: `torch_fp8.nn.loss_head.linear_cross_entropy`;
* ``frozen``: the same without a gradient of the weight, as in LoRA.

For log-probabilities, ``stock`` is TRL's ``selective_log_softmax`` and ``entropy_from_logits`` of
given logits, ``TRL`` is its kernel for both, and ``ours`` our kernel, all without the product.

* ``median_ms``: time on the GPU; ``tflops``: FLOPs of the products over that time;
* ``peak_mib``: peak memory, not counting the allocations before;
* ``loss_error``: relative, against float32 logits; ``grad_hidden_db``, ``grad_weight_db``: SQNR
  against stock's gradients.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.card import free, peak_mib
from benchmarks.measurement import (
    NOT_REACHED,
    Budget,
    Table,
    Timing,
    default_device,
    environment,
    interleaved,
    note_of,
    parser,
    print_table,
)
from torch_fp8.kernels.loss_arguments import LogitForm, LossTerms
from torch_fp8.nn.loss_head import linear_cross_entropy
from torch_fp8.ops.cross_entropy import cross_entropy_rows
from torch_fp8_tools.metrics import sqnr_db

HEADS = {
    "Llama-3.2-1B": (16384, 2048, 128256),
    "Llama-3.1-8B": (8192, 4096, 128256),
}
"""Tokens, features and classes."""
TOY_HEADS = {"Llama-3.2-1B": (96, 32, 512)}
LOGITS, TOY_LOGITS = (8, 1024, 151936), (2, 16, 512)
STOCK, LOGPROBS = "stock", "log-probabilities"
COLUMNS = (
    *("model", "tokens", "variant", "median_ms", "p20_ms", "p80_ms", "speedup", "tflops"),
    *("peak_mib", "loss_error", "grad_hidden_db", "grad_weight_db", "note"),
)
REPETITIONS, TOY_REPETITIONS = 15, 2


class Case(NamedTuple):
    """Operands of a head on the device, in BF16."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor


def stock(case: Case) -> Tensor:
    """Compute the loss as transformers' causal models do."""
    return F.cross_entropy(F.linear(case.hidden, case.weight).float(), case.labels)


def of_torch(case: Case) -> Tensor:
    """Compute the loss by torch's own fused function."""
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(case.hidden, case.weight, case.labels, options=options)


def of_liger(case: Case) -> Tensor:
    """Compute the loss by Liger's fused function."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    result = liger_fused_linear_cross_entropy(case.hidden, case.weight, case.labels)
    return result if isinstance(result, Tensor) else result[0]


def of_trl(case: Case) -> Tensor:
    """Compute the loss by TRL's fused output layer."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as CHUNK

    options = None, case.labels, 1.0, CHUNK, None, 1.0, ()
    log_probs = ChunkedLogProbFunction.apply(case.hidden, case.weight, *options)
    return -log_probs[0].mean()


VARIANTS: dict[str, Callable[[Case], Tensor]] = {
    STOCK: stock,
    "torch": of_torch,
    "Liger": of_liger,
    "TRL": of_trl,
    "ours, BF16": lambda case: linear_cross_entropy(*case),
    "ours, FP8": lambda case: linear_cross_entropy(*case, precision="fp8"),
    "ours, BF16, frozen": lambda case: linear_cross_entropy(
        case.hidden, case.weight.detach(), case.labels
    ),
    "ours, FP8, frozen": lambda case: linear_cross_entropy(
        case.hidden, case.weight.detach(), case.labels, precision="fp8"
    ),
}


def main() -> None:
    arguments = parser("head", __doc__)
    arguments.add_argument("--models", nargs="+", choices=HEADS, default=list(HEADS))
    arguments = arguments.parse_args()
    device, budget = default_device(), Budget(arguments.budget)
    table = Table(arguments.csv, COLUMNS, ("model", "tokens"), environment(device))
    heads = TOY_HEADS if arguments.toy else HEADS
    for model in (name for name in arguments.models if name in heads):
        where = {"model": model, "tokens": heads[model][0]}
        if not budget.fits():
            table.add([where | {"note": NOT_REACHED}])
            continue
        with budget.piece():
            table.add([where | row for row in measure(heads[model], device)])
    shape = TOY_LOGITS if arguments.toy else LOGITS
    where = {"model": LOGPROBS, "tokens": shape[0] * shape[1]}
    if budget.fits():
        with budget.piece():
            table.add([where | row for row in measure_log_probs(shape, device)])
    else:
        table.add([where | {"note": NOT_REACHED}])
    print_table(("model", "tokens", "variant", "median_ms", "peak_mib", "note"), table.rows)


def measure(shape: tuple[int, int, int], device: torch.device) -> list[dict[str, object]]:
    """Return a row of each variant for (tokens, features, classes)."""
    tokens, features, classes = shape
    torch.manual_seed(0)
    with device:
        hidden = torch.randn(tokens, features, dtype=torch.bfloat16)
        weight = torch.randn(classes, features, dtype=torch.bfloat16) * features**-0.5
        labels = torch.randint(classes, (tokens,))
    case = Case(hidden.requires_grad_(), weight.requires_grad_(), labels)
    figures: dict[str, dict[str, object]] = {name: {} for name in VARIANTS}
    notes: dict[str, str] = {}
    runs: dict[str, Callable[[], None]] = {}
    exact = None
    for name, compute in VARIANTS.items():
        run = functools.partial(step, compute, case)
        try:
            result = run()
            exact = result if exact is None else exact
            figures[name] = errors(exact, result)
            del result
            figures[name]["peak_mib"] = round(peak_mib(run, device), 1)
        except Exception as error:
            notes[name] = note_of(error)
            free(device)
        else:
            runs[name] = run
    del exact
    free(device)
    rows = timed(runs, device, notes)
    for name, row in rows.items():
        row |= figures[name]
        if "median_ms" in row:
            products = 2 if name.endswith("frozen") else 3
            flops = 2.0 * products * tokens * features * classes
            row["tflops"] = round(flops / float(str(row["median_ms"])) / 1e9, 1)
    return list(rows.values())


def step(compute: Callable[[Case], Tensor], case: Case) -> tuple[Tensor, ...]:
    """Run one forward and backward; return the loss and the gradients."""
    for x in (case.hidden, case.weight):
        x.grad = None
    loss = compute(case)
    loss.backward()
    grads = (case.hidden.grad, case.weight.grad)
    return (loss.detach(), *(grad for grad in grads if grad is not None))


def errors(exact: tuple[Tensor, ...], result: tuple[Tensor, ...]) -> dict[str, object]:
    """Return the errors of a loss and its gradients against stock's."""
    row: dict[str, object] = {"loss_error": f"{float(result[0].float() / exact[0] - 1):.1e}"}
    names = ("grad_hidden_db", "grad_weight_db")
    for name, want, got in zip(names, exact[1:], result[1:], strict=False):
        row[name] = round(float(sqnr_db(want, got)), 1)
    return row


def measure_log_probs(shape: tuple[int, ...], device: torch.device) -> list[dict[str, object]]:
    """Return a row for each way to compute log-probabilities and entropies of given logits."""
    with device:
        logits = torch.randn(*shape, dtype=torch.bfloat16)
        labels = torch.randint(shape[-1], shape[:-1])
        minus = torch.full((labels.numel(),), -1.0)

    def separately() -> None:
        from trl.trainer.utils import entropy_from_logits, selective_log_softmax

        selective_log_softmax(logits, labels)
        entropy_from_logits(logits)

    def fused() -> None:
        from trl.kernels import selective_log_softmax_and_entropy

        selective_log_softmax_and_entropy(logits, labels)

    def ours() -> None:
        terms = LossTerms(labels.flatten(), minus, minus)
        cross_entropy_rows(logits.flatten(0, 1), terms, LogitForm(), False, True)

    notes: dict[str, str] = {}
    runs = {STOCK: separately, "TRL": fused, "ours, BF16": ours}
    return list(timed(runs, device, notes).values())


def timed(
    runs: dict[str, Callable[[], Any]], device: torch.device, notes: dict[str, str]
) -> dict[str, dict[str, object]]:
    """Return a row for each variant, with its time or the reason why it has none."""
    repetitions = TOY_REPETITIONS if device.type == "cpu" else REPETITIONS
    timings: dict[str, Timing] = interleaved(runs, device, repetitions, failures=notes)
    rows: dict[str, dict[str, object]] = {}
    for name in dict.fromkeys([*runs, *notes, *timings]):
        rows[name] = {"variant": name, "note": f"not run: {notes[name]}" if name in notes else ""}
        if name in timings:
            rows[name] |= timings[name].columns()
            if STOCK in timings:
                speedup = timings[STOCK].median / timings[name].median
                rows[name]["speedup"] = round(speedup, 3)
    return rows


if __name__ == "__main__":
    main()
