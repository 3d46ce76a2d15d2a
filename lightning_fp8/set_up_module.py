"""`SetUpModule`: a module that the plugin has set up, with its reports and start-up summary."""

import weakref
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.optim import Optimizer

from torch_fp8 import ConversionReport, OptimizerReport
from torch_fp8.conversion.selection import RUNS_IN_FP8


@dataclass(eq=False)
class SetUpModule:
    """A module that the plugin has set up, held weakly because Fabric has no teardown."""

    module: weakref.ref[nn.Module]
    report: ConversionReport | str
    """The conversion's report, or the reason why nothing could be converted."""
    optimizers: MutableMapping[Optimizer, OptimizerReport] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    wrapped: weakref.ref[nn.Module] | None = None
    announced: bool = False
    communication: object | None = None
    """The report on how gradients and weights travel, or None until the model is wrapped or
    sharded.
    """
    history: dict[str, Tensor] = field(default_factory=dict)
    """Delayed scaling's state from the last teardown, while the model is a stock one."""

    @property
    def live(self) -> nn.Module:
        """The module, which the caller knows to exist."""
        module = self.module()
        assert module is not None
        return module

    @property
    def outer(self) -> nn.Module:
        """The module, in the host's wrapper if it has one already."""
        wrapped = None if self.wrapped is None else self.wrapped()
        return self.live if wrapped is None else wrapped

    def trained_by(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer has a parameter of the module."""
        return not parameters_of(optimizer).isdisjoint(self.live.parameters())

    def summary(self, of_optimizers: Iterable[OptimizerReport]) -> str:
        """Return the start-up summary; one line for a module that was not converted."""
        module = self.live
        name = type(module).__name__.removeprefix("FSDP")
        if isinstance(self.report, str):
            named = [f"optimizer {report}" for report in of_optimizers]
            return "; ".join([f"FP8: {name} runs without FP8: {self.report}", *named])
        optimizers = list(self.optimizers)
        text = self.report.summary(module, optimizers, of_optimizers, self.communication)
        return text.replace("\n", f"\n  model     {name}\n", 1)


def refusal(reasons: str) -> ValueError:
    """Return the error for a run in which nothing can run in FP8."""
    return ValueError(
        f"precision='fp8-mixed', but no model that was set up can run in FP8: {reasons}. "
        f"{RUNS_IN_FP8}: set up a model that has some before the first backward, or train with "
        "precision='bf16-mixed'"
    )


def parameters_of(optimizer: Optimizer) -> set[Tensor]:
    """Return the parameters of all groups of an optimizer.

    A scheduler, which stock Fabric also takes where it takes optimizers, has none.
    """
    groups = getattr(optimizer, "param_groups", ())
    return {parameter for group in groups for parameter in group["params"]}
