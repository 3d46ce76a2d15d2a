"""`OptimizerReport`: the result of a conversion, printed as a line of the start-up summary."""

from dataclasses import dataclass

from torch_fp8.optim.state import MIN_NUMEL
from torch_fp8.quantization.wording import counted


@dataclass(frozen=True)
class OptimizerReport:
    """The result of `convert_optimizer`; ``str(report)`` is its line of the start-up summary.

    Attributes:
        optimizer: the name of the user's class.
        converted: whether the optimizer now has 8-bit states or split weights.
        reason: the reason why the optimizer keeps its own states, or None if they are 8-bit.
        num_split: the number of float32 weights now stored as BF16 and a residual.
        num_float32: the number of large weights that stay float32.
        why_float32: the reasons why they do, with the number of weights for each, or None if none
            do.
        num_fp8_gradients: the number of weights whose gradients are 8-bit.
        why_bf16_gradients: the reason why no gradient is 8-bit at level O3, or None if some are.
        num_hooks_restored: the number of gradient hooks that were lost (to ``fully_shard``,
            deepcopy, pickling, ``assign=True``) and put back.
        num_cached: the number of weights whose FP8 payloads are kept between steps.
        num_large: the number of parameters that are large enough for 8-bit states.
        states: a description of the optimizer's current states, for the summary.
        notes: options of the configuration that do not apply to this optimizer.
    """

    optimizer: str
    converted: bool
    reason: str | None = None
    num_split: int = 0
    num_float32: int = 0
    why_float32: str | None = None
    num_fp8_gradients: int = 0
    why_bf16_gradients: str | None = None
    num_hooks_restored: int = 0
    num_cached: int = 0
    num_large: int = 1
    states: str = "8-bit states"
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.reason is not None:
            text = f"{self.optimizer} keeps its own states: {self.reason}"
            if self.num_split:
                text += f"; {counted(self.num_split, 'weight')} in two halves"
            return text + self._gradients() + self._float32()
        if not self.num_large:
            least = f"fewer than {MIN_NUMEL:,} elements or is not a matrix"
            return f"{self.optimizer} with unchanged states: each of its parameters has {least}"
        text = f"{self.optimizer} with {self.states}{self._gradients()}"
        if self.num_cached:
            text += f", {counted(self.num_cached, 'cached weight payload')}"
        return "; ".join([text + self._float32(), *self.notes])

    def _gradients(self) -> str:
        text = ""
        if self.num_fp8_gradients:
            text += f", {counted(self.num_fp8_gradients, 'gradient')} in 8 bits"
        if self.num_hooks_restored:
            text += f" ({counted(self.num_hooks_restored, 'hook')} restored)"
        if self.why_bf16_gradients:
            text += f", no gradients in 8 bits: {self.why_bf16_gradients}"
        return text

    def _float32(self) -> str:
        if not self.num_float32:
            return ""
        weights = "weight stays" if self.num_float32 == 1 else "weights stay"
        return f", {self.num_float32} {weights} float32: {self.why_float32}"
