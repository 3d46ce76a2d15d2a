"""`weights_for_engine`: a policy's weights, one by one, in the form an inference engine expects.

A reinforcement learning loop sends the weights to the engine that generates rollouts after each
update. Names are those of a checkpoint, which stores each expert's matrices separately. Adapters
are folded into a copy of each weight when it is sent, and the copy is freed when the next weight is
requested. The base is only read, so it never changes, however often you sync.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from torch_fp8.checkpoint.export import fold_of, unwrapped
from torch_fp8.checkpoint.export_plan import Exact, ModelTensors, plan_export
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.quantization.argument_types import check_arguments
from torch_fp8.quantization.wording import check_choice

_IN_BF16 = Exact(
    "has scales from its original checkpoint that are not powers of two, so BF16 cannot hold its "
    "values; use engine='fine-grained'"
)
ENGINES = ("bf16", "fp8_per_block", "fine-grained")


def weights_for_engine(
    model: nn.Module, engine: str = "bf16", *, adapters: str = "merge"
) -> Iterator[tuple[str, Tensor]]:
    """Return an iterator over (name, tensor) of a policy's weights for an inference engine.

    Args:
        model: a transformers model converted by `torch_fp8.convert_to_float8`, possibly inside
            wrappers of torch and PEFT.
        engine: ``bf16``: BF16 tensors of the trained weights; buffers, and parameters that
            transformers keeps in float32, keep their dtype. ``fp8_per_block``: BF16 tensors for an
            engine that quantizes them online in blocks of 128 x 128. Weights of FP8 layers have the
            values that training multiplies by; an engine with power-of-two scales quantizes them to
            the same FP8 values. ``fine-grained``: E4M3 ``weight`` and float32 ``weight_scale_inv``
            for an engine that was started from such a checkpoint. For both FP8 engines the weights
            include the factors of Smooth-SwiGLU, as in `export`.
        adapters: ``merge``: ``W + delta``, rounded to BF16 once, and modules that were trained as
            copies; ``apart``: only the base.
    Returns:
        The iterator; only one layer's tensors exist at a time. Tied weights are yielded once.
    Raises:
        ValueError: `engine` or `adapters` is unknown; for the FP8 engines, a layer does not run
            blockwise, or its blocks differ from the engine's (the error names it); a weight is
            sharded; a weight is not finite or without values (raised when it is reached).
        TypeError: `model` is not a transformers model.
    """
    check_arguments(weights_for_engine, locals())
    check_choice("engine", engine, ENGINES)
    root = unwrapped(model)
    fold = fold_of(model, root, adapters)
    for name, module in fold.walk(root):
        is_fp8 = isinstance(module, Float8Layer) and engine != "bf16"
        if is_fp8 and module.fp8.recipe.name != "blockwise":
            raise ValueError(
                f"engine={engine!r} multiplies by blocks of 128 x 128, and '{name}' runs recipe "
                f"{module.fp8.recipe.name!r}; convert the model with recipe='blockwise', or start "
                "an engine in BF16"
            )
    whole = ModelTensors(lambda tensor: tensor)  # with the bits below BF16 of split weights
    if engine == "fine-grained":
        plan = plan_export(root, engine, fold, paused=True)
    elif engine == "bf16":
        plan = plan_export(root, None, fold, whole)
    else:
        plan = plan_export(root, "fine-grained", fold, whole, in_bf16=_IN_BF16, paused=True)
        for name, reason in plan.kept:
            raise ValueError(
                f"'{name}' runs in FP8, but an engine would quantize it in other blocks: {reason}; "
                f"convert the model with {name!r} in skip, and make the engine skip it too"
            )
    return ((name, value.detach()) for each in plan.groups for name, value in each.tensors())
