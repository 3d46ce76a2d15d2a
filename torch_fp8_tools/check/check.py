"""``torch-fp8 check``: measure a model's layers on batches, and propose a recipe for each.

Batches come from a text or JSONL file, or are random tokens.
"""

import argparse
import importlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_fp8.config import FP8Config
from torch_fp8.conversion.convert import conversion_report
from torch_fp8_tools.check.measure import LayerRows, down_projections, expert_rows
from torch_fp8_tools.check.proposal import FINER, Proposal, propose, text_of
from torch_fp8_tools.env.cards import usable_device
from torch_fp8_tools.env.result import last_line
from torch_fp8_tools.host_models import model_class, model_folder

_DEFAULTS = FP8Config()
_LENGTH = 512
"""The default number of tokens of a sequence."""


def check(options: argparse.Namespace) -> int:
    """Print the proposal for a model; returns the exit status."""
    output: Path | None = options.output
    if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
        raise ValueError(f"--output {output}: this file cannot be written")
    if options.data is not None and not options.data.is_file():
        raise ValueError(f"DATA {str(options.data)!r} is not a file")
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
        print("To use this configuration in every plugin, set TORCH_FP8_CONFIG to this file:")
        print(output)
    return 0


def changed_options(config: FP8Config) -> dict[str, Any]:
    """Return the options of a configuration that differ from the defaults, as its JSON has them."""
    defaults = asdict(_DEFAULTS)
    return {name: value for name, value in asdict(config).items() if value != defaults[name]}


def _model(options: argparse.Namespace) -> nn.Module:
    device = usable_device(options.device)
    folder = model_folder(options.model) or options.model
    cls = model_class(folder)
    try:
        model: nn.Module = cls.from_pretrained(folder, dtype=torch.bfloat16)
    except (OSError, ImportError):
        raise
    except Exception as error:  # transformers raises many kinds for broken models
        raise ValueError(f"{str(folder)!r} cannot be loaded: {last_line(error)}") from error
    return model.eval().to(device)


def _batches(options: argparse.Namespace, model: Any) -> list[torch.Tensor]:
    limit = getattr(model.config, "max_position_embeddings", None)
    limit = limit if isinstance(limit, int) else None  # some models have no limit
    length = options.sequence or min(_LENGTH, limit or _LENGTH)
    if limit is not None and length > limit:
        raise ValueError(f"--sequence {length} is longer than the model's {limit} positions")
    shape = options.batches, options.micro_batch, length
    if options.data is None:
        embeddings = model.get_input_embeddings()
        return random_batches(embeddings.num_embeddings, *shape, options.seed)
    auto = importlib.import_module("transformers").AutoTokenizer
    try:
        tokenizer = auto.from_pretrained(model_folder(options.model) or options.model)
    except Exception as error:  # tokenizers raise many kinds of errors
        raise ValueError(
            f"{str(options.model)!r} has no tokenizer for DATA ({last_line(error)}); save one "
            "there, or leave DATA out for random tokens"
        ) from error
    return batches_of_file(options.data, tokenizer, *shape, options.field)


@torch.no_grad()
def _proposal(model: Any, batches: list[torch.Tensor], options: argparse.Namespace) -> Proposal:
    report = conversion_report(model, FP8Config(recipe=options.recipe, emulate=True))
    layers = [LayerRows(name, model.get_submodule(name)) for name in report.converted]
    experts = expert_rows(model, report.experts)
    handles = [rows.module.register_forward_pre_hook(rows) for rows in layers]
    handles += [rows.module.register_forward_pre_hook(rows) for rows in experts]
    for batch in batches:
        model(input_ids=batch.to(options.device), use_cache=False)
    for handle in handles:
        handle.remove()
    downs, recipes = down_projections(model), list(dict.fromkeys((options.recipe, FINER)))
    findings = [rows.findings(downs.get(rows.module), recipes) for rows in layers]
    findings += [rows.findings() for rows in experts]
    return propose(findings, options.recipe, dict(report.skipped))


def _headline(model: nn.Module, batches: list[torch.Tensor], options: argparse.Namespace) -> str:
    tokens = sum(batch.numel() for batch in batches)
    source = (
        "random tokens, because no DATA was given" if options.data is None else str(options.data)
    )
    return (
        f"{type(model).__name__}, {tokens} tokens in {len(batches)} batches ({source}); dB is the "
        "signal-to-noise ratio of the median token of a layer's output, 28.5 of Gaussian values"
    )


def _as_dict(proposal: Proposal) -> dict[str, Any]:
    layers = [
        {**asdict(layer.found), "options": layer.options, "reasons": list(layer.reasons)}
        for layer in proposal.layers
    ]
    more = {"notes": list(proposal.notes), "skipped": dict(proposal.skipped)}
    return {"config": changed_options(proposal.config), "layers": layers, **more}


_MOST_CHARACTERS = 4_000_000
"""The maximum number of characters read from a file; a few batches need no more."""


def random_batches(vocab_size: int, count: int, rows: int, length: int, seed: int) -> list[Tensor]:
    """Return `count` batches (rows, length) of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (rows, length), generator=generator) for _ in range(count)]


def batches_of_file(
    path: Path, tokenizer: Any, count: int, rows: int, length: int, field: str
) -> list[Tensor]:
    """Return batches (rows, length) of a file's tokens, fewer if the file is too short.

    Args:
        path: a text file, or JSONL (by the name's ending) whose objects have the text in `field`.
        tokenizer: the model's tokenizer.
        count: the maximum number of batches.
        rows, length: the sequences of a batch, and the tokens of a sequence.
        field: the name of the text field in JSONL.
    Raises:
        ValueError: the file cannot be read, is not JSONL, has no such field, or too few tokens.
    """
    tokens: list[int] = []
    for text in _texts(path, field):
        tokens += tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(tokens) >= count * rows * length:
            break
    if len(tokens) < length:
        raise ValueError(
            f"{str(path)!r} has {len(tokens)} tokens, fewer than one sequence of {length}; use a "
            "longer file, or a smaller --sequence"
        )
    sequences = torch.tensor(tokens[: len(tokens) // length * length], dtype=torch.int64).view(
        -1, length
    )
    return list(sequences[: count * rows].split(rows))


def _texts(path: Path, field: str) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            content = file.read(_MOST_CHARACTERS)
            is_cut = bool(file.read(1))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"DATA {str(path)!r} cannot be read as text: {error}") from error
    if path.suffix not in (".jsonl", ".json", ".ndjson"):
        yield content
        return
    lines = content.splitlines()
    for number, line in enumerate(lines[:-1] if is_cut else lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{str(path)!r}, line {number}, is not valid JSON: {error}") from error
        text = value.get(field) if isinstance(value, dict) else None
        if not isinstance(text, str):
            has = ", ".join(map(repr, value)) if isinstance(value, dict) else repr(value)[:60]
            raise ValueError(
                f"{str(path)!r}, line {number}, has no text field {field!r} (it has {has}); set "
                "the field with --field"
            )
        yield text
