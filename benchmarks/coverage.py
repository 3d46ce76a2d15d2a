"""How much of 90 transformers architectures runs in FP8, and their loss compared with BF16.

    nice -n 19 python -m benchmarks.coverage            # from the repository's root

Each architecture, tiny and with random weights (`benchmarks.architectures`), learns one batch by
heart for 30 steps, in BF16 and in FP8 from the same weights. The difference of the last losses is a
share of the first step's loss, because some models end near 0. One run of a tiny model says little
about a difference of a percent, since two BF16 runs whose weights differ by a millionth also end
apart. The table shows the share of the FLOPs, and that nothing breaks.
A finished architecture becomes a row of the CSV at once, and is not run again unless it failed.

``--experts`` counts, on the meta device, the FLOPs of mixtures of experts with the default sizes of
their configuration classes. ``--table`` writes docs/coverage.md from the committed rows.
"""

import argparse
import datetime
import os
import warnings
from pathlib import Path

import torch

from benchmarks.architectures import KINDS, batch_for, make
from benchmarks.evidence import small_models_loss
from benchmarks.rows import ROOT, add_csv, commit, read_rows, tell_kept, write_rows
from torch_fp8 import ConversionReport, FP8Config, convert_optimizer, convert_to_float8

STEPS, LEARNING_RATE = 30, 1e-3
RESULTS, TABLE = ROOT / "benchmarks/results/coverage.csv", ROOT / "docs/coverage.md"
EXPERTS = ROOT / "benchmarks/results/coverage_experts.csv"
MIXTURES = (
    *("mixtral", "gpt_oss", "olmoe", "qwen3_moe", "qwen3_next", "deepseek_v3", "nemotron_h"),
    "llama4_text",
)
EXPERT_COLUMNS = [
    *("architecture", "parameters", "flops_share", "outside_head"),
    *("torch", "transformers", "commit", "date", "command"),
]
COLUMNS = [
    *("architecture", "kind", "parameters", "layers", "linear_layers", "fused"),
    *("flops_share", "expert_share", "steps", "first_loss", "bf16_loss", "fp8_loss", "difference"),
    *("failure", "torch", "transformers", "commit", "date", "command"),
]
TEXT = """# Coverage: which parts of a model run in FP8

The tables show how much of {count} transformers architectures runs in FP8, and their loss.
`python -m benchmarks.coverage` builds, converts and trains tiny models with random weights
(rows and versions: `benchmarks/results/coverage.csv`; CPU emulation, level O2, recipe tensorwise).

* *Layers*: number of linear layers in FP8, and of all linear layers.
* *FLOPs in FP8*: share of the FLOPs of all matrix products with a weight, forward and backward.
  The output layer (`lm_head`) stays in high precision by default, and is a larger part of a tiny
  model than of a real one.
* *Loss*: loss of one batch after {steps} steps, in BF16 and in FP8 from the same weights and
  seed. The *difference* is in percent of the first step's loss, for one seed.

## Mixture of experts

transformers stores the weights of all experts of a block in 3-D parameters (Mixtral, GPT-OSS,
OLMoE, Qwen3-MoE, DeepSeek-V3, Llama-4 and others). [They run in FP8 grouped GEMMs](moe.md). The
table gives the share of FP8 in a token's FLOPs, including the experts that it visits, at the
default sizes of transformers' configuration classes (`python -m benchmarks.coverage --experts`).
The last column leaves out the output layer, which stays in high precision.

| architecture | parameters | FLOPs in FP8 | outside `lm_head` |
|---|---|---|---|
{experts}

## Ten seeds

One seed says little. The table shows how much higher the loss of six small models (0.07 to 0.19
million parameters) ends after 30 steps, in percent of BF16's loss: the mean of ten seeds with its
standard error (`python -m benchmarks.evidence.small_models_loss`,
`benchmarks/results/small_models_loss.csv`).

* *BF16, perturbed*: BF16 from weights perturbed by a millionth, which shows BF16's own spread.
* *Rounded in forward*, *in all GEMMs*: stock BF16 without this package, with the operands of
  linear layers and experts rounded to 8 bits in forward, or in all three GEMMs.
* *O2*, and *O2 beyond that*: level O2, and its difference from *in all GEMMs*, seed by seed.

For models of this size, O2 costs as much as rounding to 8 bits, and nothing systematic (above both
0.5 % and three standard errors) beyond that. The models learn 8 rows of random tokens by heart. A
model that memorizes a batch ends at a floor that rounding noise sets, and more noise raises it. We
do not know whether larger models, or models that do not memorize, end higher, too. In [the
fine-tuning and pretraining runs](results.md#loss-by-level), with 4 and 0.5 million parameters, O2
ends within the spread. [What FP8 costs in loss](loss.md) shows which rounding causes the loss of
these models.

| model | BF16, perturbed | rounded in forward | in all GEMMs | O2 | O2 beyond that |
|---|---|---|---|---|---|
{seeds}

## {count} architectures

In rows with a share of experts, the experts still ran in BF16.

| architecture | kind | layers | FLOPs in FP8 | of experts | loss in BF16 | in FP8 | difference |
|---|---|---|---|---|---|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*KINDS, []], help="none: all", metavar="name")
    text = "write docs/coverage.md from the committed rows, and end"
    parser.add_argument("--table", action="store_true", help=text)
    parser.add_argument("--experts", action="store_true", help="count only mixtures of experts")
    add_csv(parser, RESULTS.stem)
    arguments = parser.parse_args()
    tell_kept(arguments.csv)
    os.environ.pop("TORCH_FP8_CONFIG", None)
    torch.set_num_threads(1)
    if arguments.table:
        TABLE.write_text(document(by_architecture(RESULTS), by_architecture(EXPERTS)))
        return
    if arguments.experts:
        counted = [count_mixture(name) for name in MIXTURES]
        write_rows(arguments.csv.with_name(EXPERTS.name), EXPERT_COLUMNS, counted)
        return
    for name in arguments.names or list(KINDS):
        rows = by_architecture(arguments.csv)
        if name in rows and not rows[name]["failure"]:
            continue
        rows[name] = row = measure(name)
        write_rows(arguments.csv, COLUMNS, [rows[name] for name in KINDS if name in rows])
        print(f"{name:18} {row['flops_share']:>6} {row['difference']:>8} {row['failure']}")


def measure(name: str) -> dict[str, str]:
    """Return a row of the CSV, with FP8's failure where there is one."""
    row = dict.fromkeys(COLUMNS, "") | _origin(name)
    row |= {"architecture": name, "kind": KINDS[name], "steps": str(STEPS)}
    losses, _ = train(name, None)
    row |= {"first_loss": f"{losses[0]:.4f}", "bf16_loss": f"{losses[-1]:.4f}"}
    try:
        fp8, report = train(name, FP8Config())
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        return row | {"failure": f"{type(error).__name__}: {line}"[:200]}
    assert report is not None
    return row | {
        "parameters": str(sum(p.numel() for p in make(name).parameters())),
        "layers": str(report.num_converted),
        "linear_layers": str(report.num_layers),
        "fused": str(len(report.producers)),
        "flops_share": f"{report.flops_share:.4f}",
        "expert_share": f"{report.flops.experts / report.flops.total:.4f}",
        "fp8_loss": f"{fp8[-1]:.4f}",
        "difference": f"{(fp8[-1] - losses[-1]) / losses[0]:+.5f}",
    }


def count_mixture(name: str) -> dict[str, str]:
    """Return a row for the mixture of experts `name`, of the default size, without data."""
    import transformers

    with torch.device("meta"):
        config = transformers.CONFIG_MAPPING[name]()
        model = transformers.AutoModelForCausalLM.from_config(config)
    report = convert_to_float8(model, FP8Config())
    head = 3 * model.get_output_embeddings().weight.numel()
    return {
        "architecture": name,
        "parameters": str(sum(p.numel() for p in model.parameters())),
        "flops_share": f"{report.flops_share:.4f}",
        "outside_head": f"{report.flops.fp8 / (report.flops.total - head):.4f}",
        **_origin("--experts"),
    }


def _origin(arguments: str) -> dict[str, str]:
    import transformers

    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit(),
        "date": f"{datetime.date.today()}",
        "command": f"python -m benchmarks.coverage {arguments}",
    }


def train(
    name: str, config: FP8Config | None, steps: int = STEPS
) -> tuple[list[float], ConversionReport | None]:
    """Return the loss of each step, and the report of the conversion.

    Args:
        name: the architecture's name.
        config: configuration of FP8, or None for BF16.
        steps: number of AdamW's steps.
    """
    torch.manual_seed(0)
    model, report = make(name), None
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    if config is not None:
        report = convert_to_float8(model, config)
        convert_optimizer(optimizer, config, model=model)
    batch = batch_for(name, model, torch.Generator().manual_seed(1))
    losses = []
    torch.manual_seed(2)  # of dropout, where a model has it nonetheless
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, report


def by_architecture(path: Path) -> dict[str, dict[str, str]]:
    """Return the existing rows, by architecture."""
    return {row["architecture"]: row for row in read_rows(path)}


def document(rows: dict[str, dict[str, str]], mixtures: dict[str, dict[str, str]]) -> str:
    """Return the text of docs/coverage.md."""
    experts = "\n".join(map(_mixture_line, mixtures.values()))
    seeds = small_models_loss.table(small_models_loss.read_rows(small_models_loss.RESULTS))
    text = TEXT.format(steps=STEPS, count=len(rows), experts=experts, seeds=seeds)
    lines = [text.rstrip("\n")]
    for name in sorted(rows):
        row = rows[name]
        if row["failure"]:
            loss = f"{row['bf16_loss']} | fails | {row['failure'].replace('|', '/')}"
            lines.append(f"| {name} | {row['kind']} | | | | {loss} |")
            continue
        experts = _percent(row["expert_share"]) if float(row["expert_share"]) else ""
        difference = f"{100 * float(row['difference']):+.2f} %"
        loss = f"{row['bf16_loss']} | {row['fp8_loss']} | {difference}"
        lines.append(
            f"| {name} | {row['kind']} | {row['layers']} of {row['linear_layers']} | "
            f"{_percent(row['flops_share'])} | {experts} | {loss} |"
        )
    return "\n".join(lines) + "\n"


def _mixture_line(row: dict[str, str]) -> str:
    return (
        f"| {row['architecture']} | {int(row['parameters']) / 1e9:.1f} billion | "
        f"{_percent(row['flops_share'])} | {_percent(row['outside_head'])} |"
    )


def _percent(share: str) -> str:
    return f"{100 * float(share):.1f} %"


if __name__ == "__main__":
    main()
