"""What a comparison does before it trains: model and data are made, loaded and checked.

    python benchmarks/comparison/before_training.py [arguments of the fine-tuning scripts]

The model is converted once on the meta device, so that one that FP8 refuses is refused now, and on
a CPU a micro-batch is timed, so that the expected time is known.
"""

import script_start

if __name__ == "__main__":
    script_start.begin()

import time
from dataclasses import replace

import torch
import torch_fp8
from transformers import AutoModelForCausalLM, PreTrainedModel

from fine_tuning import FineTuning, prepare
from script_start import Refusal
from sft_arguments import argument_parser

FP8_ON_A_CPU = 4.0
"""The time of a step in emulation, in multiples of BF16's."""
FORWARD = 1 / 3
"""The share of the forward in forward and backward."""


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


def expected_seconds(run: FineTuning) -> float:
    """Return about how long the run takes on this CPU in BF16, from one micro-batch."""
    arguments, model = run.arguments, run.model.train()
    batch = next(iter(run.train_loader(1)))
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        seconds.append(time.perf_counter() - began)
    steps = run.steps(1)
    evaluations = 1 + -(-steps // arguments.eval_every)
    batches = steps * arguments.accumulate + FORWARD * evaluations * len(run.eval_loader())
    return min(seconds[1:]) * batches


def main() -> None:
    imports = time.monotonic() - script_start.STARTED
    arguments = argument_parser(__doc__.splitlines()[0]).parse_args()
    if arguments.started_by_comparison:
        script_start.end_with_input()
    run = prepare(arguments)
    report = check_conversion(run.model)
    fp8, total = len(report.converted), len(report.converted) + len(report.skipped)
    print(
        f"Checked: {run.model.num_parameters() / 1e6:.1f} million parameters, "
        f"{fp8} of {total} linear layers can run in FP8, {run.steps(1)} optimizer steps"
    )
    if torch.cuda.is_available():
        return
    bf16 = expected_seconds(run)
    fp8_seconds = FP8_ON_A_CPU * bf16
    print(
        f"Expected from here: about {(bf16 + fp8_seconds + 3 * imports) / 60:.1f} minutes, "
        f"{bf16:.0f} s in BF16 and {fp8_seconds:.0f} s in FP8, which a CPU emulates"
    )


if __name__ == "__main__":
    script_start.run(main)
