"""Loss of small random models after 30 steps in FP8, against BF16 and BF16's own spread.

    nice -n 19 python -m benchmarks.evidence.small_models_loss       # from the repository's root

One run says little, because two BF16 runs whose weights differ by a millionth also end apart. So
each architecture runs with ten seeds, each seed in BF16, in BF16 from perturbed weights and in FP8,
on the same rows in the same order. A difference is systematic if its mean over the seeds is several
standard errors from 0, while that of the perturbed runs is not. ``--runs`` selects parts of FP8.
Two of them are stock BF16 without this package, with rounded operands in linear layers: in one the
inputs and weights of the forward GEMM, to E4M3 with one scale per tensor, in the other the operands
of all three GEMMs, gradients to E5M2 (E4M3 in fused experts). For none of the six models is the
difference between level O2 and the second systematic, seed by seed: the difference from BF16 is the
cost of rounding to 8 bits for a model of this size. Mamba loses the most, 4 %, most of it in its
largest layer, ``in_proj``; its norms, ``x_proj``, the optimizer and the format of gradients change
little. Since its loss falls by several percent per step, that is a fraction of a step.

A finished run becomes a row of the CSV at once, and an existing row is not run again.

The models have random weights with the standard deviations of their classes, and learn the same 8
rows of random tokens by heart in 30 steps of AdamW with learning rate 2e-3. The loss
is that of these rows at the end, without dropout.
"""

import argparse
import datetime
import functools
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.rows import ROOT, add_csv, append_rows, commit, tell_kept
from benchmarks.rows import read_rows as read_csv
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8
from torch_fp8.quantization.formats import GEMM_ALIGNMENT

BASELINE, PERTURBED = "bf16", "bf16, perturbed by 1e-6"
ROUNDED = "bf16, operands rounded to E4M3"
ROUNDED_ALL = "bf16, all three GEMMs' operands rounded"
MUON, MUON_PERTURBED, MUON_INT8 = "muon", "muon, perturbed by 1e-6", "muon, optimizer alone"
MODULE = "benchmarks.evidence.small_models_loss"
STEPS, ROWS, LENGTH, VOCABULARY, LEARNING_RATE = 30, 8, 32, 128, 2e-3
BAND, ERRORS = 0.005, 3
"""A mean difference beyond both, 0.5 % and so many standard errors, is called systematic."""
RESULTS = ROOT / "benchmarks/results/small_models_loss.csv"
COLUMNS = [
    *("model", "run", "seed", "steps", "loss", "bf16_loss", "rel_diff"),
    *("torch", "transformers", "commit", "date", "command"),
]

# The parts of FP8 that a run uses: the layers' configuration or None, and the optimizer's.
RUNS: dict[str, tuple[FP8Config | None, FP8Config | None]] = {
    BASELINE: (None, None),
    PERTURBED: (None, None),
    ROUNDED: (None, None),
    ROUNDED_ALL: (None, None),
    "O2": (FP8Config(), FP8Config()),
    "O3": (FP8Config(opt_level="O3"), FP8Config(opt_level="O3")),
    "O1": (FP8Config(opt_level="O1"), None),
    "optimizer alone": (None, FP8Config()),
    MUON: (None, None),
    MUON_PERTURBED: (None, None),
    MUON_INT8: (None, FP8Config()),
    "O1, wgrad bf16": (FP8Config(opt_level="O1", wgrad="bf16"), None),
    "O1, activations bf16": (FP8Config(opt_level="O1", save_activations="bf16"), None),
    "O1, gradients E4M3": (FP8Config(opt_level="O1", grad_format="e4m3"), None),
    "O1, without x_proj": (FP8Config(opt_level="O1", skip=("lm_head", "x_proj")), None),
    "O1, without in_proj": (FP8Config(opt_level="O1", skip=("lm_head", "in_proj")), None),
    "O1, without out_proj": (FP8Config(opt_level="O1", skip=("lm_head", "out_proj")), None),
    "O1, without wo": (FP8Config(opt_level="O1", skip=("lm_head", "wo")), None),
    "O1, rowwise": (FP8Config(opt_level="O1", recipe="rowwise"), None),
    "O1, blockwise": (FP8Config(opt_level="O1", recipe="blockwise"), None),
}
DEFAULT = [BASELINE, PERTURBED, "O2"]
Multiply = Callable[[str, Tensor, Tensor, torch.dtype], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=DEFAULT)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(10)))
    parser.add_argument("--steps", type=int, default=STEPS)
    add_csv(parser, "small_models_loss")
    arguments = parser.parse_args()
    tell_kept(arguments.csv)
    os.environ.pop("TORCH_FP8_CONFIG", None)
    torch.set_num_threads(1)
    for seed in arguments.seeds:  # outside: an interrupted benchmark has compared every model
        for model in arguments.models:
            for run in dict.fromkeys([BASELINE, *arguments.runs]):
                rows = read_rows(arguments.csv)
                if (model, run, seed) in rows:
                    continue
                start = time.perf_counter()
                loss = train(model, run, seed, arguments.steps)
                row = as_columns(model, run, seed, arguments.steps, loss, rows)
                append_rows(arguments.csv, COLUMNS, [row])
                seconds = time.perf_counter() - start
                print(f"{model:12} {run:24} seed {seed}: {loss:.4f} {row['rel_diff']}", end="")
                print(f"  {seconds:.0f} s", flush=True)
    print_summary(read_rows(arguments.csv))


def train(
    name: str,
    run: str,
    seed: int,
    steps: int = STEPS,
    after_step: Callable[[nn.Module, torch.optim.Optimizer], None] | None = None,
    change: Callable[[nn.Module], Callable[[int], None] | None] | None = None,
) -> float:
    """Return the loss after training.

    Args:
        name: name in MODELS or DEEP.
        run: name in RUNS; another name is BF16 with the effect of `change`.
        seed: number from which weights, data and dropout come.
        steps: number of the optimizer's steps.
        after_step: function that is called after each step.
        change: function that changes the model before the optimizer exists. It may return a
            function that is called with the number of steps left: before each step, and before
            the evaluation.
    """
    torch.manual_seed(seed)
    model = (MODELS | DEEP | LARGE | FROZEN)[name]()
    layers, states = RUNS.get(run, RUNS[BASELINE])
    if run in (PERTURBED, MUON_PERTURBED):
        perturb(model, seed)
    if run in (ROUNDED, ROUNDED_ALL):
        round_operands(model, _rounded_all if run == ROUNDED_ALL else _rounded)
    model.train()
    before_step = None if change is None else change(model)
    optimizers = make_optimizers(model, run)
    if layers is not None:
        convert_to_float8(model, layers)
    for optimizer in optimizers if states is not None else ():
        convert_optimizer(optimizer, states, model=model)
    data = torch.Generator().manual_seed(1000 + seed)
    classes = CLASSES if name in LARGE | FROZEN else VOCABULARY
    tokens = torch.randint(2, classes, (ROWS, LENGTH), generator=data)
    hidden = torch.rand(tokens.shape, generator=data) < 0.15
    torch.manual_seed(seed)  # of dropout
    for left in range(steps, 0, -1):
        if before_step is not None:
            before_step(left)
        loss_of(name, model, tokens, hidden).backward()
        for optimizer in optimizers:
            optimizer.step()
            if after_step is not None:
                after_step(model, optimizer)
            optimizer.zero_grad()
    model.eval()
    if before_step is not None:
        before_step(0)
    with torch.no_grad():
        return float(loss_of(name, model, tokens, hidden))


def make_optimizers(model: nn.Module, run: str) -> list[torch.optim.Optimizer]:
    """Return AdamW; of a run of Muon, that for the matrices within layers, and AdamW for others."""
    if run not in (MUON, MUON_PERTURBED, MUON_INT8):
        return [torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)]
    named = list(model.named_parameters())
    inner = [p for name, p in named if p.ndim == 2 and "embed" not in name and "head" not in name]
    others = [p for _, p in named if not any(p is q for q in inner)]
    muon = torch.optim.Muon(inner, lr=LEARNING_RATE, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, lr=LEARNING_RATE)]


def perturb(model: nn.Module, seed: int) -> None:
    """Change each weight by about a millionth of itself."""
    generator = torch.Generator().manual_seed(2000 + seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 1e-6 * torch.randn(weight.shape, generator=generator))


def round_operands(model: nn.Module, multiply: Multiply) -> None:
    """Replace the product of linear layers, except the output layer and layers too small for FP8.

    Args:
        model: model whose layers call it from now on.
        multiply: function of a layer's name, x (..., K), w (N, K) and the format of gradients,
            which returns y (..., N). An expert's name ends in its number.
    """
    for name, module in model.named_modules():
        if hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, nn.Parameter):
            module.forward = functools.partial(_experts, module, name, multiply)
        if not isinstance(module, nn.Linear) or name == "lm_head":
            continue
        if min(module.in_features, module.out_features) >= GEMM_ALIGNMENT:
            module.forward = functools.partial(_linear, module, name, multiply)


def _rounded(name: str, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return F.linear(_Rounded.apply(x), _Rounded.apply(weight))


def _rounded_all(name: str, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    # What comes back is the operand of both GEMMs in backward; a bias takes it as it is.
    return _RoundedGradient.apply(_rounded(name, x, weight, dtype), dtype)


def _linear(module: nn.Linear, name: str, multiply: Multiply, x: Tensor) -> Tensor:
    product = multiply(name, x, module.weight, torch.float8_e5m2)
    return product if module.bias is None else product + module.bias.to(product.dtype)


def _experts(
    module: Any, name: str, multiply: Multiply, x: Tensor, top_k_index: Tensor, scores: Tensor
) -> Tensor:
    """Compute fused experts one after the other; gradients are E4M3 here, as in FP8."""
    output = torch.zeros_like(x)
    for expert in range(module.num_experts):
        token, choice = (top_k_index == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        y = x[token]
        for part in ("gate_up_proj", "down_proj"):
            weight = getattr(module, part)[expert]
            y = multiply(f"{name}.{part}.{expert}", y, weight, torch.float8_e4m3fn)
            y = module._apply_gate(y) if weight.shape[1] == x.shape[1] else y
        score = scores[token, choice, None]
        output = output.index_add(0, token, (y * score).to(output.dtype))
    return output


class _Rounded(torch.autograd.Function):
    """A function that rounds x to E4M3; its gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _near(x, torch.float8_e4m3fn)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _RoundedGradient(torch.autograd.Function):
    """A function that passes x as it is and rounds its gradient to `dtype`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _near(grad, ctx.dtype), None


def _near(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x to nearest, with the scale that its amax asks for."""
    scale = x.abs().amax().float().clamp(min=1e-12) / torch.finfo(dtype).max
    return ((x.float() / scale).to(dtype).float() * scale).to(x.dtype)


def loss_of(name: str, model: nn.Module, tokens: Tensor, hidden: Tensor) -> Tensor:
    """Return the model's own loss under autocast: of the next token, of hidden ones, or of the
    text.

    Args:
        tokens: (ROWS, LENGTH).
        hidden: which of them a masked model has to predict.
    """
    inputs, labels = tokens, tokens
    if name in MASKED:
        inputs, labels = tokens.masked_fill(hidden, 0), tokens.masked_fill(~hidden, -100)
    with torch.autocast("cpu", torch.bfloat16):
        loss: Tensor = model(input_ids=inputs, labels=labels).loss
    return loss


def _config(name: str, **options: object) -> object:
    import transformers

    config = getattr(transformers, f"{name}Config")
    options = {"vocab_size": VOCABULARY} | options
    return config(pad_token_id=0, bos_token_id=1, eos_token_id=1, **options)


def _llama(**changes: int) -> nn.Module:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(_config("Llama", **_DECODER | changes))


def _gemma3(**changes: int) -> nn.Module:
    from transformers import Gemma3ForCausalLM

    return Gemma3ForCausalLM(_config("Gemma3Text", head_dim=16, **_DECODER | changes))


def _mamba(**changes: int) -> nn.Module:
    from transformers import MambaForCausalLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 16}
    return MambaForCausalLM(_config("Mamba", **sizes | changes))


def _t5(**changes: int) -> nn.Module:
    from transformers import T5ForConditionalGeneration

    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 160, "num_layers": 2, "num_heads": 4}
    config = _config("T5", decoder_start_token_id=0, **sizes | changes)
    return T5ForConditionalGeneration(config)


def _distilbert(**changes: int) -> nn.Module:
    from transformers import DistilBertForMaskedLM

    sizes = {"dim": 64, "hidden_dim": 160, "n_layers": 2, "n_heads": 4}
    return DistilBertForMaskedLM(
        _config("DistilBert", max_position_embeddings=64, **sizes | changes)
    )


def _qwen3_moe(**changes: int) -> nn.Module:
    from transformers import Qwen3MoeForCausalLM

    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    config = _config("Qwen3Moe", mlp_only_layers=[], head_dim=16, **sizes, **_DECODER | changes)
    return Qwen3MoeForCausalLM(config)


_DECODER = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS: dict[str, Callable[..., nn.Module]] = {
    "llama": _llama,
    "gemma3": _gemma3,
    "mamba": _mamba,
    "t5": _t5,
    "distilbert": _distilbert,
    "qwen3_moe": _qwen3_moe,
}
DEEP = {"llama8": functools.partial(_llama, num_hidden_layers=8)}
"""Models in which a rule for some of the blocks leaves others."""
CLASSES = 4096
"""The least number of classes whose loss is computed without logits."""


def _frozen(build: Callable[[], nn.Module]) -> nn.Module:
    model = build()
    model.get_output_embeddings().weight.requires_grad_(False)
    return model


LARGE = {
    f"{name}, 4,096 classes": functools.partial(build, vocab_size=CLASSES)
    for name, build in MODELS.items()
}
FROZEN = {f"{name}, frozen": functools.partial(_frozen, build) for name, build in LARGE.items()}
"""Models whose output layer, and embedding if they are tied, is not trained."""
MASKED = ("distilbert", "distilbert, 4,096 classes", "distilbert, 4,096 classes, frozen")


def as_columns(model: str, run: str, seed: int, steps: int, loss: float, rows: dict) -> dict:
    """Return the columns of a row.

    Args:
        rows: those that are there, for BF16's loss.
    """
    import transformers

    baseline = rows.get((model, BASELINE, seed))
    bf16 = loss if baseline is None else float(baseline["loss"])
    return {
        "model": model,
        "run": run,
        "seed": seed,
        "steps": steps,
        "loss": f"{loss:.6f}",
        "bf16_loss": f"{bf16:.6f}",
        "rel_diff": f"{loss / bf16 - 1:+.6f}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit(),
        "date": f"{datetime.date.today():%Y-%m-%d}",
        "command": f"python -m {MODULE} --models {model} --runs '{run}'",
    }


def read_rows(path: Path) -> dict[tuple[str, str, int], dict]:
    """Return the CSV's rows by (model, run, seed)."""
    return {(row["model"], row["run"], int(row["seed"])): row for row in read_csv(path)}


def summary(rows: dict[tuple[str, str, int], dict]) -> dict[tuple[str, str], tuple[float, ...]]:
    """Return each model's and run's mean difference from BF16, its standard error and deviation."""
    made = {}
    for model, run in dict.fromkeys((m, r) for m, r, _ in rows):
        of_run = [
            float(row["rel_diff"]) for (m, r, _), row in rows.items() if (m, r) == (model, run)
        ]
        spread = statistics.stdev(of_run) if len(of_run) > 1 else math.nan
        made[model, run] = statistics.mean(of_run), spread / math.sqrt(len(of_run)), spread
    return made


def paired(
    rows: dict[tuple[str, str, int], dict], model: str, run: str, control: str
) -> tuple[float, float]:
    """Return the mean difference of two runs of the same seeds, as shares of BF16's loss, and its
    error.

    Args:
        rows: of the CSV.
        model: key of MODELS.
        run, control: keys of RUNS.
    """
    by_seed: list[dict[int, float]] = [
        {seed: float(row["rel_diff"]) for (m, r, seed), row in rows.items() if (m, r) == (model, n)}
        for n in (run, control)
    ]
    both = [by_seed[0][seed] - by_seed[1][seed] for seed in by_seed[0].keys() & by_seed[1].keys()]
    return statistics.mean(both), statistics.stdev(both) / math.sqrt(len(both))


def table(rows: dict[tuple[str, str, int], dict]) -> str:
    """Return each model's differences from BF16, and O2's from its control, as docs/coverage.md has
    them.
    """
    made, lines = summary(rows), []
    for model in MODELS:
        shown = [made[model, run][:2] for run in (PERTURBED, ROUNDED, ROUNDED_ALL, "O2")]
        shown.append(paired(rows, model, "O2", ROUNDED_ALL))
        cells = [f"{100 * mean:+.2f} ± {100 * error:.2f} %" for mean, error in shown]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def is_systematic(mean: float, error: float) -> bool:
    return abs(mean) > max(BAND, ERRORS * error)


def print_summary(rows: dict[tuple[str, str, int], dict]) -> None:
    """Print the result of `summary`."""
    print(f"{'model':12} {'run':32} {'mean':>9} {'std. err.':>10} {'std. dev.':>10}")
    for (model, run), (mean, error, spread) in summary(rows).items():
        if run != BASELINE:
            verdict = "  systematic" if is_systematic(mean, error) else ""
            print(f"{model:12} {run:32} {mean:+9.3%} {error:10.3%} {spread:10.3%}{verdict}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    main()
