"""Models that were prepared for evaluation, and are stored as FP8 alone once nobody trains them.

``prepare_model(model, evaluation_mode=True)`` does not mean frozen: transformers' Trainer prepares
the model that it will train so, to evaluate it before training. What proves it is that training
begins, some optimizer is prepared, and none has a parameter of the model. Reference, reward and
teacher models of TRL are of that kind.
"""

from collections.abc import Iterable, MutableMapping

from torch import Tensor, nn
from torch.optim import Optimizer

from accelerate_fp8.optimizers import WeakKeys
from torch_fp8 import FP8Config
from torch_fp8.autograd.current_pass import RunsFP8
from torch_fp8.conversion.frozen_layers import FreezeReport, freeze_weights, option_that_keeps
from torch_fp8.conversion.memory import size_text
from torch_fp8.conversion.share_frozen import share_equal_weights
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
        """Store as FP8 alone what none of these optimizers trains, if there is one.

        Args:
            optimizers: the user's own, as far as they were prepared.
        Returns:
            What was frozen, by model.
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
                device = next(model.parameters()).device
                report = freeze_weights(model, self.config, device, _any)
                if report.frozen:
                    reports[model] = report
                    self._frozen[model] = None
        return reports

    def share(self, trained: Iterable[nn.Module]) -> str | None:
        """Keep one copy of frozen weights that are equal, such as the bases of a LoRA policy and
        of its reference.

        Args:
            trained: the models that were prepared to be trained.
        Returns:
            A line that says how many weights share memory; None: nothing new does.
        """
        if not self._frozen:
            return None
        shared = share_equal_weights([*trained, *self._frozen])
        if not shared.num_weights:
            return None
        return (
            f"{shared.num_weights} frozen weights are equal to others and share one copy with them "
            f"until either is written, {size_text(shared.num_bytes)} less"
        )


def _refuse_training(model: nn.Module, trained: set[Tensor]) -> None:
    for name, parameter in model.named_parameters():
        if parameter in trained and isinstance(local(parameter), Float8FrozenWeight):
            raise ValueError(
                f"an optimizer has '{name}' of {type(model).__name__}, which is stored as FP8 "
                "alone: it was prepared with evaluation_mode=True, and no optimizer had it when "
                "training began. Call torch_fp8.thaw(model) before you make the optimizer, or "
                "choose FP8Config(frozen_weights='keep')"
            )


def _any(module: RunsFP8) -> bool:
    del module
    return True
