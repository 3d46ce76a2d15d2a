"""The sub-command ``torch-fp8 check``."""

import argparse
import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_fp8.advisor.batches import batches_of_file, random_batches
from torch_fp8.advisor.measure import measure
from torch_fp8.advisor.proposal import FINER, Proposal, propose
from torch_fp8.advisor.table import text_of
from torch_fp8.config import FP8Config
from torch_fp8.conversion.convert import conversion_report
from torch_fp8.environment.cards import usable_device
from torch_fp8.environment.host_models import model_class
from torch_fp8.quantization.recipe import RECIPES

_DEFAULTS = FP8Config()
_LENGTH = 512
"""The tokens of a sequence, where nothing else is said."""


def add_parser(commands: Any) -> None:
    """Add the sub-command to those of ``torch-fp8``."""
    parser = commands.add_parser(
        "check",
        help="run a few batches through a model and propose a recipe for each layer",
        description=(
            "Run a few batches through a model in BF16, try FP8's casts on what each layer gets, "
            "and propose a recipe for each, with reasons. Exit status: 0 proposed, 1 something "
            "failed, 2 a mistake in the call, 130 interrupted."
        ),
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="a folder of transformers")
    parser.add_argument(
        "data", type=Path, nargs="?", metavar="DATA", help="text or JSONL (none: random tokens)"
    )
    parser.add_argument("--recipe", choices=RECIPES, default="tensorwise", help="of the model")
    whole: dict[str, Any] = {"type": _positive, "metavar": "N"}
    parser.add_argument("--batches", **whole, default=4, help="(default: 4)")
    parser.add_argument("--micro-batch", **whole, default=2, help="sequences of one (default: 2)")
    parser.add_argument("--sequence", **whole, help="tokens of one (512, or the model's most)")
    parser.add_argument("--field", default="text", help="of a JSONL file (default: text)")
    parser.add_argument("--seed", type=int, default=0, help="of random tokens (default: 0)")
    parser.add_argument("--device", default="cpu", help="where it runs (default: cpu)")
    parser.add_argument("--output", type=Path, metavar="FILE",
                        help="write the configuration there, for TORCH_FP8_CONFIG")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the sub-command; returns the exit status."""
    try:
        return _check(options)
    except (ValueError, TypeError) as error:
        print(f"torch-fp8 check: {error}", file=sys.stderr)
        return 2
    except (OSError, ImportError, RuntimeError) as error:
        print(f"torch-fp8 check: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return 130


def _check(options: argparse.Namespace) -> int:
    output: Path | None = options.output
    if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
        raise ValueError(f"--output {output}: no file can be written there")
    if options.data is not None and not options.data.is_file():
        raise ValueError(f"DATA {str(options.data)!r} is no file")
    model = _model(options)
    batches = _batches(options, model)
    proposal = _proposal(model, batches, options)
    text = json.dumps(changed_options(proposal.config), indent=2)
    if output is not None:
        output.write_text(text + "\n")
    if options.json:
        print(json.dumps(_as_dict(proposal), indent=2))
        return 0
    print(text_of(proposal, _headline(model, batches, options)))
    if output is None:
        print(text)
    else:
        print("TORCH_FP8_CONFIG, set to this file, has every plugin read the configuration:")
        print(output)
    return 0


def changed_options(config: FP8Config) -> dict[str, Any]:
    """Return the options of a configuration that are not the defaults, as its JSON has them."""
    defaults = asdict(_DEFAULTS)
    return {name: value for name, value in asdict(config).items() if value != defaults[name]}


def _model(options: argparse.Namespace) -> nn.Module:
    device = usable_device(options.device)
    cls = model_class(options.model)
    model: nn.Module = cls.from_pretrained(options.model, dtype=torch.bfloat16)
    return model.eval().to(device)


def _batches(options: argparse.Namespace, model: Any) -> list[torch.Tensor]:
    limit = getattr(model.config, "max_position_embeddings", None)
    limit = limit if isinstance(limit, int) else None  # some models have none
    length = options.sequence or min(_LENGTH, limit or _LENGTH)
    if limit is not None and length > limit:
        raise ValueError(f"--sequence {length} is longer than the model's {limit} positions")
    shape = options.batches, options.micro_batch, length
    if options.data is None:
        embeddings = model.get_input_embeddings()
        return random_batches(embeddings.num_embeddings, *shape, options.seed)
    auto = importlib.import_module("transformers").AutoTokenizer
    try:
        tokenizer = auto.from_pretrained(options.model)
    except Exception as error:  # whatever a tokenizer of whatever class cannot find
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{str(options.model)!r} has no tokenizer for DATA ({line[:120]}); save one there, or "
            "leave DATA out for random tokens"
        ) from error
    return batches_of_file(options.data, tokenizer, *shape, options.field)


def _proposal(
    model: nn.Module, batches: list[torch.Tensor], options: argparse.Namespace
) -> Proposal:
    report = conversion_report(model, FP8Config(recipe=options.recipe, emulate=True))

    def forward(model: Any, batch: torch.Tensor) -> None:
        model(input_ids=batch.to(options.device), use_cache=False)

    recipes = list(dict.fromkeys((options.recipe, FINER)))
    findings = measure(model, report.converted, batches, forward, recipes)
    return propose(findings, options.recipe, dict(report.skipped))


def _headline(model: nn.Module, batches: list[torch.Tensor], options: argparse.Namespace) -> str:
    tokens = sum(batch.numel() for batch in batches)
    source = "random tokens, for no DATA was named" if options.data is None else str(options.data)
    return (
        f"{type(model).__name__}, {tokens} tokens in {len(batches)} batches ({source}); dB is the "
        "signal-to-noise ratio of the median token of a layer's output, 28.5 of Gaussian values"
    )


def _as_dict(proposal: Proposal) -> dict[str, Any]:
    layers = [
        {
            "name": layer.found.name,
            "options": layer.options,
            "reasons": list(layer.reasons),
            "db": layer.found.db,
            "largest_channel": layer.found.ratio,
            "aligned_channels": layer.found.aligned,
        }
        for layer in proposal.layers
    ]
    return {
        "config": changed_options(proposal.config),
        "layers": layers,
        "notes": list(proposal.notes),
        "skipped": dict(proposal.skipped),
    }


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value
