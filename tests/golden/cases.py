"""The runs of one process: five recipes on three levels, and options that change a layer's path."""

import io
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.golden.training import SAVED_AFTER, STEPS, Run, adamw, digests, leave_groups, llama
from torch_fp8 import (
    FP8Config,
    convert_optimizer,
    convert_to_float8,
    load_scaling_state_dict,
    merged_state_dict,
    scaling_state_dict,
)


@dataclass(frozen=True)
class Case:
    """What is converted how.

    Attributes:
        recipe, level: of `FP8Config`.
        options: other fields of it.
        checkpointing: None, or the arguments of activation checkpointing.
        compiled: whether the decoder layers are.
    """

    recipe: str
    level: str
    options: dict[str, Any] = field(default_factory=dict)
    checkpointing: dict[str, Any] | None = None
    compiled: bool = False

    @property
    def config(self) -> FP8Config:
        options = dict(self.options)
        if self.recipe == "delayed":
            options["amax_history_len"] = 8  # it comes round within a run
        return FP8Config(recipe=self.recipe, opt_level=self.level, **options)


RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8")
PLAIN = {"use_reentrant": False}
CASES = {
    **{f"{r} {level}": Case(r, level) for r in RECIPES for level in ("O1", "O2", "O3")},
    "tensorwise O3 gradient release": Case("tensorwise", "O3", {"gradient_release": True}),
    "tensorwise O2 cached weights": Case("tensorwise", "O2", {"cache_weights": True}),
    "blockwise O2 wgrad in BF16": Case("blockwise", "O2", {"wgrad": "bf16"}),
    "mxfp8 O2 activations in BF16": Case("mxfp8", "O2", {"save_activations": "bf16"}),
    "delayed O2 checkpointing": Case("delayed", "O2", checkpointing=PLAIN),
    "tensorwise O2 compiled": Case("tensorwise", "O2", compiled=True),
}


def run_of(case: Case, seed: int = 0) -> Run:
    model = llama(seed)
    optimizer = adamw(model)
    convert_to_float8(model, case.config)
    leave_groups(model)
    convert_optimizer(optimizer, case.config, model=model)
    if case.checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=case.checkpointing)
    if case.compiled:
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
    return Run(model, optimizer, releases=case.config.gradient_release)


def state_of(run: Run) -> dict[str, Any]:
    return {
        "model": run.module.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "scaling": scaling_state_dict(run.module),
    }


def recorded(case: Case) -> dict[str, Any]:
    """The run, its checkpoint, and the end of a run that resumes from it, with another seed."""
    run = run_of(case)
    noted = run.train(range(1, SAVED_AFTER + 1))
    state, file = state_of(run), io.BytesIO()
    torch.save(state, file)
    made: dict[str, Any] = {"checkpoint": {name: digests(part) for name, part in state.items()}}
    made["checkpoint"]["merged"] = digests(merged_state_dict(run.module, run.optimizer))
    rest = run.train(range(SAVED_AFTER + 1, STEPS + 1))
    made |= {name: values + rest[name] for name, values in noted.items()}
    file.seek(0)
    fresh, loaded = run_of(case, seed=1), torch.load(file, weights_only=True)
    fresh.module.load_state_dict(loaded["model"])
    fresh.optimizer.load_state_dict(loaded["optimizer"])
    load_scaling_state_dict(fresh.module, loaded["scaling"])
    made["resumed"] = fresh.train(range(SAVED_AFTER + 1, STEPS + 1))
    made["end"] = {name: digests(part) for name, part in state_of(run).items()}
    return made
