"""`Observer`: observes a model in one step.

In a measured step each layer has a `LayerObserver`. The layer shows it the payloads that its GEMMs
multiply and the tensors from which these were cast, and the statistics compare the two. The monitor
casts nothing itself, so its numbers describe the cast that ran, with its actual scale. The payload
may come from the layer, or from the norm or gated MLP before it; it may be kept from an earlier
forward, gathered in FP8, or cast with an outdated history. Only a layer that has left FP8 for a
while has hooks, because it multiplies no payload: its operands are cast as they would be in FP8.
The search for a clip also casts gradients with other scales.

The first micro-batch of a step counts. The second pass of a checkpoint adds what the first did not
compute, the transposed input. A forward without gradients counts if a layer in training mode has no
other in the step, as in frozen parts of a model. If two GEMMs multiply payloads of one tensor with
different scales, the worse one counts.

The source of an input after a converted norm or gated MLP was never written in 16 bits. It is
recomputed from the producer's inputs and discarded (`LazyQuantizedTensor`).

A compiled model would ignore an observer that is added later. In an observed step torch runs it
eagerly (``torch.compiler.set_stance``), which rounds as eager models do; afterwards the graphs are
used again.

`hook_step` detects the end of a step with torch's own hooks on an optimizer.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torch_fp8.monitor.expert_observer import ExpertModules
from torch_fp8.monitor.layer_observer import LayerObserver, Observation, matrix, trains
from torch_fp8.monitor.statistics import logit_sharpness
from torch_fp8.nn.linear import Float8Layer, is_paused


class Observer:
    """Observes a model in one step.

    Args:
        layers: (qualified name, module) of the layers.
        experts: the modules of fused experts.
        clip_search: whether to search for the clip of gradients.
        head: the layer whose output is the logits, for their sharpness; or None.
        failed: a function called with an error in an observation.
    Attributes:
        step: the observations of the step.
    """

    def __init__(
        self,
        layers: Iterable[tuple[str, Float8Layer]],
        experts: ExpertModules,
        *,
        clip_search: bool = False,
        head: nn.Module | None = None,
        failed: Callable[[Exception], None],
    ) -> None:
        self.layers, self.experts, self.head = list(layers), experts, head
        self.step = Observation(clip_search, failed)
        self.step.goes_on = False
        self._handles: list[RemovableHandle] = []
        self._stance: Any = None

    def install(self, *, eager: bool = False) -> None:
        """Start to observe a step.

        Args:
            eager: whether to run the step eagerly, because a part of the model is compiled.
        """
        step = self.step = Observation(self.step.clip_search, self.step.failed)
        for name, layer in self._in_fp8():
            of_layer = LayerObserver(step, name, layer, step.seen)
            layer.fp8.observe(of_layer)
            if is_paused(layer):
                before, after = Hook(of_layer.before_paused), Hook(of_layer.after_paused)
                self._handles.append(layer.register_forward_pre_hook(before))
                self._handles.append(layer.register_forward_hook(after))
        self.experts.observe(step)
        if self.head is not None:
            self._handles.append(self.head.register_forward_hook(Hook(self._after_head)))
        if eager:
            self._stance = torch.compiler.set_stance("force_eager")

    def remove(self) -> None:
        """Stop observing; the observations remain."""
        if self.step.goes_on:
            for _, layer in self._in_fp8():
                layer.fp8.observe(None)
            self.experts.observe(None)
        self.step.goes_on = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._stance is not None:
            self._stance.__exit__(None, None, None)  # restore the stance
            self._stance = None

    def _in_fp8(self) -> list[tuple[str, Float8Layer]]:
        """Return the layers that have not been reverted meanwhile."""
        return [(name, layer) for name, layer in self.layers if isinstance(layer, Float8Layer)]

    def _after_head(self, head: nn.Module, args: Any, output: Any) -> None:
        if not (trains() and isinstance(output, Tensor) and output.requires_grad):
            return
        logits, look = output.detach(), self.step.look
        output.register_hook(
            lambda grad: look("logits", lambda: logit_sharpness(matrix(logits), matrix(grad)))
        )

    @property
    def seen(self) -> dict[str, Tensor]:
        """Return statistics by place; forwards without gradients count if there are no others."""
        return {**self.step.idle, **self.step.seen}


class Hook:
    """A hook on a layer; in a copied or unpickled layer it does nothing."""

    def __init__(self, look: Callable[..., None]) -> None:
        self.look: Callable[..., None] | None = look

    def __call__(self, *args: Any) -> None:
        if self.look is not None:
            self.look(*args)

    def __getstate__(self) -> dict[str, Any]:
        return {"look": None}


def hook_step(
    optimizers: Sequence[Optimizer],
    before_update: Callable[[], None],
    after_update: Callable[[], None],
) -> list[Any]:
    """Hook the optimizer with the most elements; its step may get a closure that runs the backward.

    Args:
        optimizers: the optimizers of a model.
        before_update: a function called when all gradients exist.
        after_update: a function called after the weights are updated.
    Returns:
        The handles that remove the hooks.
    """
    sizes = [sum(p.numel() for g in o.param_groups for p in g["params"]) for o in optimizers]
    main = optimizers[sizes.index(max(sizes))]

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            before_update()
            return None

        def measured() -> Any:
            result = closure()
            before_update()
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": measured}
        return (args[0], measured, *args[2:]), kwargs

    return [  # a compiled step breaks its graph to run them
        main.register_step_pre_hook(torch.compiler.disable(before)),
        main.register_step_post_hook(torch.compiler.disable(lambda *_: after_update())),
    ]
