"""`Run`: one run of a random program, with FP8 or without."""

import contextlib
import copy
import io
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import torch_fp8
from tests.random_models import MODELS, blocks_of, loss_of, recompute_blocks
from tests.random_programs import Program
from torch_fp8 import FP8Config

STEPS, MIDDLE = 6, 3


class Run:
    """One run of a program, on one process.

    Args:
        program: random program to train.
        fp8: whether the model and the optimizers are converted.
        changes: entries of the loop in place of the program's own; None leaves one out.
    """

    def __init__(self, program: Program, fp8: bool = True, **changes: Any) -> None:
        torch.manual_seed(program.seed)
        self.program, self.fp8 = program, fp8
        self.loop = {**program.loop, **changes}
        self.loop = {name: value for name, value in self.loop.items() if value is not None}
        self.model = MODELS[program.model]().to(getattr(torch, program.dtype))
        if mode := self.loop.get("recompute"):
            recompute_blocks(self.model, mode)
        self._prepare()
        self.schedulers = [
            torch.optim.lr_scheduler.ExponentialLR(o, 0.8)
            for o in self.optimizers
            if self.loop.get("scheduler")
        ]
        enabled = bool(self.loop.get("scaler"))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=enabled)
        self.average: Any = None
        self._compile()

    def _prepare(self) -> None:
        self.optimizers = self._optimizers()
        if self.fp8:
            self._convert()

    def _convert(self) -> None:
        config = FP8Config(**self.program.options)
        torch_fp8.convert_to_float8(self.model, config)
        for optimizer in self.optimizers:
            torch_fp8.convert_optimizer(optimizer, config, model=self.model)

    def _compile(self) -> None:
        torch._dynamo.reset()
        if self.loop.get("compile") == "model":
            self.model.compile(backend=self.loop.get("backend", "aot_eager"))
        elif self.loop.get("compile") == "blocks":
            for block in blocks_of(self.model):
                block.compile(backend=self.loop.get("backend", "aot_eager"))

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        options = {n: v for n, v in self.program.optimizer.items() if n not in ("optimizer",)}
        groups, name = options.pop("groups"), self.program.optimizer["optimizer"]
        named = [(n, p) for n, p in self.model.named_parameters()]
        if "freeze" not in self.loop:
            named = [(n, p) for n, p in named if p.requires_grad]
        rate = {"SGD": 0.05, "Muon": 0.01, "Adafactor": 0.01}.get(name, 2e-3)
        if name == "SGD":
            options["momentum"] = 0.9
        matrices = [p for n, p in named if p.ndim == 2 and "embed" not in n and "head" not in n]
        if name == "Muon":
            others = [p for _, p in named if not any(p is m for m in matrices)]
            optimizers: list[torch.optim.Optimizer] = [
                torch.optim.Muon(matrices, lr=rate, **options)
            ]
            return [*optimizers, torch.optim.AdamW(others, lr=2e-3)] if others else optimizers
        cls = getattr(torch.optim, name)
        if groups == 1:
            return [cls([p for _, p in named], lr=rate, **options)]
        split: list[dict[str, Any]] = [
            {"params": [p for _, p in named if p.ndim >= 2]},
            {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0, "lr": rate / 2},
        ]
        return [cls([group for group in split if group["params"]], lr=rate, **options)]

    def _rows(self, step: int, micro: int) -> int:
        kind = self.loop.get("rows")
        if kind == "odd":
            return 13 + 2 * step + micro
        if kind == "one":
            return 1
        return 0 if kind == "empty" and (step + micro) % 2 else 16

    def _loss(self, step: int, micro: int = 0, state: Any = None) -> Tensor:
        autocast: Any = contextlib.nullcontext()
        if "autocast" in self.loop or self.program.dtype == "bfloat16":
            autocast = torch.autocast("cpu", torch.bfloat16)
        with autocast:
            seed = 1000 * step + micro
            loss = loss_of(self.model, self._rows(step, micro), seed, state)
            if "penalty" in self.loop:
                weights = [p for p in self.model.parameters() if p.ndim == 2]
                loss = loss + 1e-4 * torch.stack([w.float().square().sum() for w in weights]).sum()
        return -loss if self.program.optimizer.get("maximize") else loss

    def _before(self, step: int) -> None:
        """What the loop does to the model before a step."""
        if (mode := self.loop.get("freeze")) is not None and step:
            frozen = (mode == "freeze") == (step in (2, 3))
            blocks_of(self.model)[0].requires_grad_(not frozen)
            if frozen:
                blocks_of(self.model)[0].zero_grad()
        if step == 2 and "write" in self.loop:
            self._write(self.loop["write"])
        if step == 2 and "average" in self.loop and self.average is None:
            self._start_average()
        if step == 4 and "event" in self.loop:
            self._event(self.loop["event"])

    def _event(self, event: str) -> None:
        model = self.model
        if event in ("load", "load all"):
            model.load_state_dict(copy.deepcopy(model.state_dict()))
        if event == "load all":
            for optimizer in self.optimizers:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif event in ("copy", "pickle"):
            self._replace(event)
        elif event == "restore" and self.fp8:
            for optimizer in self.optimizers:
                torch_fp8.restore_weights(optimizer)
        elif event == "revert" and self.fp8:
            scaling = torch_fp8.scaling_state_dict(model)
            torch_fp8.revert(model)
        elif event == "requires_grad":
            wanted = [p.requires_grad for p in model.parameters()]
            model.requires_grad_(False)
            for parameter, value in zip(model.parameters(), wanted, strict=True):
                parameter.requires_grad_(value)
        elif event == "state":
            self.state()
        elif event == "train":
            model.eval()
            model.train()
        elif event == "report" and self.fp8:
            torch_fp8.memory_report(model, self.optimizers[0])
            torch_fp8.merged_state_dict(model, self.optimizers)
            repr((model, self.optimizers, list(model.parameters())))
        elif event == "swap":
            for parameter in model.parameters():
                backup = parameter.data
                parameter.data = torch.zeros_like(backup)
                parameter.data = backup
        elif event in ("inference", "high precision", "functional"):
            self._look(event)
        if self.fp8 and event in ("convert", "pickle", "restore", "revert"):
            self._convert()
        if self.fp8 and event == "revert":
            torch_fp8.load_scaling_state_dict(model, scaling)

    def _replace(self, event: str) -> None:
        """Continue with a copy of the model, the optimizers and the schedulers."""
        parts = self.model, self.optimizers, self.schedulers
        if event == "copy":
            parts = copy.deepcopy(parts)
        else:
            file = io.BytesIO()
            torch.save(parts, file)
            file.seek(0)
            parts = torch.load(file, weights_only=False)
        self.model, self.optimizers, self.schedulers = parts

    def _look(self, event: str) -> None:
        """Run the model without gradients, in another mode."""
        if event == "inference":
            with torch.inference_mode():
                self.evaluate()
        elif event == "high precision" and self.fp8:
            with torch_fp8.high_precision():
                self._loss(998).backward()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        elif event == "functional":
            state = dict(self.model.named_parameters())
            with torch.no_grad():
                self._loss(997, state=state)

    def _start_average(self) -> None:
        if self.loop["average"] == "deepcopy":
            self.average = copy.deepcopy(self.model).eval()
        else:
            self.average = torch.optim.swa_utils.AveragedModel(self.model)

    @torch.no_grad()
    def _write(self, kind: str) -> None:
        weight = next(p for p in blocks_of(self.model)[-1].parameters() if p.ndim == 2)
        if kind == "mul":
            weight.mul_(0.75)
        elif kind == "copy":
            weight.copy_(weight.float().flip(0) * 1.001)
        elif kind == "data":
            weight.data = weight.data * 0.75
        elif kind == "swap":
            backup = weight.data
            weight.data = torch.zeros_like(backup)
            weight.data = backup
        else:
            generator = torch.Generator().manual_seed(5)
            nn.init.normal_(weight, std=0.05, generator=generator)

    def _backward(self, step: int) -> float:
        count = self.loop.get("accumulation", 1)
        total = 0.0
        for micro in range(count):
            loss = self._loss(step, micro) / count
            self.scaler.scale(loss).backward()
            total += loss.item()
        return total

    def _step(self, step: int) -> float:
        if "closure" in self.loop and "scaler" not in self.loop and len(self.optimizers) == 1:

            def closure() -> float:
                self._zero()
                total = self._backward(step)
                self._clip()
                return total

            return float(self.optimizers[0].step(closure))
        self._zero()
        total = self._backward(step)
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        self._clip()
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        return total

    def _zero(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none="keep_zeros" not in self.loop)

    def _clip(self) -> None:
        if self.loop.get("clipping") == "norm":
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        elif self.loop.get("clipping") == "value":
            nn.utils.clip_grad_value_(self.model.parameters(), 0.01)

    def train(self, first: int = 0, last: int = STEPS) -> list[float]:
        """The losses of the steps from `first` to before `last`."""
        losses = []
        for step in range(first, last):
            self._before(step)
            losses.append(self._step(step))
            for scheduler in self.schedulers:
                scheduler.step()
            if self.average is not None and step >= 2:
                self._update_average()
            if "evaluate" in self.loop and step % 2:
                losses.append(self.evaluate())
        if self.program.optimizer.get("maximize"):
            return [-loss for loss in losses]
        return losses

    @torch.no_grad()
    def _update_average(self) -> None:
        if self.loop["average"] == "deepcopy":
            for mean, value in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(value, 0.5)
        else:
            self.average.update_parameters(self.model)

    @torch.no_grad()
    def evaluate(self) -> float:
        """The loss in evaluation mode on a batch of its own."""
        self.model.eval()
        loss = self._loss(999).item()
        self.model.train()
        return loss

    def weights(self) -> dict[str, Tensor]:
        """Copies of all parameters, buffers, and those of the average, as user code reads them."""
        return {name: value.detach().clone() for name, value in self._tensors()}

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.state_dict().items()
        if self.average is not None:
            for name, value in self.average.state_dict().items():
                yield f"average.{name}", value

    def state(self) -> dict[str, Any]:
        """All that a checkpoint of this loop holds."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "schedulers": [s.state_dict() for s in self.schedulers],
            "scaler": self.scaler.state_dict(),
        }
        if self.average is not None:
            state["average"] = self.average.state_dict()
        if self.fp8:
            state["scaling"] = torch_fp8.scaling_state_dict(self.model)
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        if "scaler" in self.loop:
            self.scaler.load_state_dict(state["scaler"])
        if "average" in state:
            self._start_average()
            self.average.load_state_dict(state["average"])
        if self.fp8:
            torch_fp8.load_scaling_state_dict(self.model, state["scaling"])
