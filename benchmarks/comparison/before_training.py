"""What a comparison does before it trains: model and data are made, loaded and checked.

    python benchmarks/comparison/before_training.py [arguments of the fine-tuning scripts]

The model is converted once on the meta device, so that one that FP8 refuses is refused now. On a
CPU, a few steps are timed in both precisions, so that the expected time is known.
"""

import script_start

if __name__ == "__main__":
    script_start.begin()

import time
from dataclasses import replace

import torch
import torch_fp8
from torch_fp8_tools.compare import bf16_products
from transformers import AutoModelForCausalLM, PreTrainedModel

from fine_tuning import FineTuning, prepare
from fine_tuning_time import Work, step_times
from script_start import Refusal
from sft_arguments import argument_parser


def check_conversion(model: PreTrainedModel) -> torch_fp8.ConversionReport:
    """Convert a copy without weights, as the run in FP8 will convert the model.

    Raises:
        Refusal: it cannot be.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        config = torch_fp8.FP8Config.from_env() or torch_fp8.FP8Config()
        if config.recipe == "auto":  # nothing is to be measured here
            config = replace(config, recipe="tensorwise")
        with torch.device("meta"):
            copy = AutoModelForCausalLM.from_config(model.config)
        return torch_fp8.convert_to_float8(copy, config, device=device)
    except (ValueError, TypeError, ImportError) as error:
        said = " ".join(str(error).split())
        raise Refusal(f"this model cannot be trained in FP8, nothing was trained: {said}") from None


def expected_seconds(run: FineTuning) -> tuple[float, float]:
    """Return about how long the runs in BF16 and in FP8 take on this CPU; they spoil the model."""
    arguments, steps = run.arguments, run.steps(1)
    evaluations = 1 + -(-steps // arguments.eval_every)
    work = Work(steps * arguments.accumulate, steps, evaluations * len(run.eval_loader()))
    bf16, fp8 = step_times(run.model, next(iter(run.train_loader(1))))
    return bf16.of(work), fp8.of(work)


def main() -> None:
    imports = time.monotonic() - script_start.STARTED
    arguments = argument_parser(__doc__.splitlines()[0]).parse_args()
    if arguments.started_by_comparison:
        script_start.end_with_input()
    bf16_products.choose(arguments.bf16_products)
    run = prepare(arguments)
    report = check_conversion(run.model)
    converted = len(report.converted)
    print(
        f"Checked: {run.model.num_parameters() / 1e6:.1f} million parameters, "
        f"{converted} of {converted + len(report.skipped)} linear layers can run in FP8, "
        f"{run.steps(1)} optimizer steps"
    )
    if torch.cuda.is_available():
        return
    bf16, fp8 = expected_seconds(run)
    print(
        f"Expected from here: about {(bf16 + fp8 + 3 * imports) / 60:.1f} minutes, "
        f"{bf16:.0f} s in BF16 and {fp8:.0f} s in FP8, which a CPU emulates"
    )


if __name__ == "__main__":
    script_start.run(main)
