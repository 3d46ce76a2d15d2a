"""`SharedOutput`: a norm of another kind, whose output FP8 layers cast once for all of them."""

from torch import Tensor, nn

from torch_fp8.module_class import add_mixin, remove_mixin
from torch_fp8.produced_activation import shared


class SharedOutput(nn.Module):
    """The part of such a norm that goes in front of its own class; its output is what it was."""

    fp8_name: str

    def forward(self, hidden_states: Tensor) -> Tensor:
        output: Tensor = super().forward(hidden_states)
        return shared(output, self.fp8_name)


def share_output(module: nn.Module, name: str) -> bool:
    """Make a LayerNorm, Hugging Face's own ones included, share its output, in place.

    Known by one weight (C,), maybe a bias, and "LayerNorm" in its class's name, of which there are
    too many for a list. False, and nothing done, if it is none.
    """
    if not isinstance(module, SharedOutput):
        weight = module._parameters.get("weight")
        is_norm = weight is not None and weight.ndim == 1 and "LayerNorm" in type(module).__name__
        if not is_norm or module._modules or "forward" in module.__dict__:
            return False
        add_mixin(module, SharedOutput)
        assert isinstance(module, SharedOutput)
    module.fp8_name = name
    return True


def keep_output(module: SharedOutput) -> None:
    """Undo `share_output`."""
    del module.fp8_name
    remove_mixin(module, SharedOutput)
