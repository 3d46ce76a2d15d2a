"""Models that were prepared for evaluation, and are stored only in FP8 if no optimizer trains them.

``prepare_model(model, evaluation_mode=True)`` does not mean that a model is frozen: transformers'
Trainer prepares the model that it will train in this way, to evaluate it before training. A model
counts as frozen when training begins, an optimizer has been prepared, and none has a parameter of
the model. TRL's reference, reward and teacher models are of this kind.
"""

from collections.abc import Iterable, MutableMapping

from torch import Tensor, nn
from torch.optim import Optimizer

from accelerate_fp8.optimizers import WeakKeys
from torch_fp8 import FP8Config, freeze
from torch_fp8.conversion.frozen_layers import (
    FreezeReport,
    option_that_keeps,
    share_equal_weights,
)
from torch_fp8.conversion.memory import size_text
from torch_fp8.tensor.dtensor import local
from torch_fp8.tensor.frozen_weight import Float8FrozenWeight


class EvaluationModels:
    """The models that one Accelerator has prepared for evaluation and not frozen yet."""

    def __init__(self, config: FP8Config) -> None:
        self.config = config
        self._waiting: MutableMapping[nn.Module, None] = WeakKeys()
        self._frozen: MutableMapping[nn.Module, None] = WeakKeys()

    def note(self, model: nn.Module) -> None:
        """Remember a converted model."""
        if option_that_keeps(self.config) is None:
            self._waiting[model] = None

    def freeze(self, optimizers: Iterable[Optimizer]) -> dict[nn.Module, FreezeReport]:
        """Freeze the models that no optimizer trains, if there is an optimizer at all.

        Args:
            optimizers: the user's own optimizers that were prepared so far.
        Returns:
            A report for each frozen model.
        Raises:
            ValueError: an optimizer has parameters of a model that was frozen before.
        """
        trained = {p for o in optimizers for group in o.param_groups for p in group["params"]}
        if not trained:
            return {}
        for model in self._frozen:
            _refuse_training(model, trained)
        reports = {}
        for model in list(self._waiting):
            del self._waiting[model]
            if trained.isdisjoint(model.parameters()):
                report = freeze(model)
                if report.frozen:
                    reports[model] = report
                    self._frozen[model] = None
        return reports

    def share(self, trained: Iterable[nn.Module]) -> str | None:
        """Store equal frozen weights once, for example a LoRA policy's and its reference's.

        Args:
            trained: the models that were prepared for training.
        Returns:
            A line with the number of weights that share memory, or None if there are no new ones.
        """
        if not self._frozen:
            return None
        num_weights, num_bytes = share_equal_weights([*trained, *self._frozen])
        if not num_weights:
            return None
        return (
            f"{num_weights} frozen weights equal others and share one copy with them until "
            f"either is written, saving {size_text(num_bytes)}"
        )


def _refuse_training(model: nn.Module, trained: set[Tensor]) -> None:
    for name, parameter in model.named_parameters():
        if parameter in trained and isinstance(local(parameter), Float8FrozenWeight):
            raise ValueError(
                f"an optimizer has '{name}' of {type(model).__name__}, which is stored in FP8 "
                "only: it was prepared with evaluation_mode=True, and no optimizer held it when "
                "training began. Call torch_fp8.thaw(model) before you make the optimizer, or "
                "choose FP8Config(frozen_weights='keep')"
            )
