"""`weights_for_engine`: a policy's weights, one by one, in the form an inference engine expects.

A reinforcement learning loop sends the weights to the engine that generates rollouts after each
update. Names are those of a checkpoint, which stores each expert's matrices separately. Adapters
are folded into a copy of each weight when it is sent, and the copy is freed when the next weight is
requested. The base is only read, so it never changes, however often you sync.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from torch_fp8.checkpoint.export import unwrapped
from torch_fp8.checkpoint.export_plan import ExportPlan, model_parts, plan_export
from torch_fp8.checkpoint.export_refusals import check_finite
from torch_fp8.checkpoint.export_values import checked_payload
from torch_fp8.checkpoint.fold_adapters import ADAPTERS, AdapterFold, refuse_prompts
from torch_fp8.checkpoint.fold_smooth import SmoothFold
from torch_fp8.checkpoint.plain_dtype import plain_dtype
from torch_fp8.checkpoint.stored_names import StoredPart, own_tensors
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.ops.quantize import dequantize
from torch_fp8.quantization.argument_types import check_arguments
from torch_fp8.tensor.base import dequantized

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
            blockwise, or its blocks differ from the engine's (the error names it); a weight is not
            finite, sharded or without values (raised when it is reached).
        TypeError: `model` is not a transformers model.
    """
    check_arguments(weights_for_engine, locals())
    if engine not in ENGINES:
        raise ValueError(f"engine={engine!r} is unknown; one of {', '.join(map(repr, ENGINES))}")
    if adapters not in ADAPTERS:
        raise ValueError(f"adapters={adapters!r} is unknown; supported: 'merge' and 'apart'")
    root = unwrapped(model)
    if adapters == "merge":
        refuse_prompts(model)
    fold = AdapterFold(root, merge=adapters == "merge")
    if engine == "bf16":
        return _in_bf16(root, fold)
    for name, module in fold.walk(root):
        if isinstance(module, Float8Layer) and module.fp8.recipe.name != "blockwise":
            raise ValueError(
                f"engine={engine!r} multiplies by blocks of 128 x 128, and '{name}' runs recipe "
                f"{module.fp8.recipe.name!r}; convert the model with recipe='blockwise', or start "
                "an engine in BF16"
            )
    plan = plan_export(root, "fine-grained", fold, paused=True)
    if engine == "fine-grained":
        return _as_planned(plan)
    for name, reason in plan.kept:
        raise ValueError(
            f"'{name}' runs in FP8, but an engine would quantize it in other blocks: {reason}; "
            f"convert the model with {name!r} in skip, and make the engine skip it too"
        )
    return _in_values_of_fp8(root, fold, plan.smooth, set(plan.fp8))


def _as_planned(plan: ExportPlan) -> Iterator[tuple[str, Tensor]]:
    for group in plan.groups:
        for planned, value in zip(group.tensors, group.make(), strict=True):
            yield planned.name, value.detach()


@torch.no_grad()
def _in_bf16(root: nn.Module, fold: AdapterFold) -> Iterator[tuple[str, Tensor]]:
    for _, _, value, dtype, parts in _folded(root, fold):
        yield from _plain(value, dtype, parts)


@torch.no_grad()
def _in_values_of_fp8(
    root: nn.Module, fold: AdapterFold, smooth: SmoothFold | None, in_fp8: set[str]
) -> Iterator[tuple[str, Tensor]]:
    for key, module, value, dtype, parts in _folded(root, fold):
        if isinstance(module, Float8Layer) and key.removesuffix(".weight") in in_fp8:
            value = value if smooth is None else smooth.weight(module, value)
            payload = checked_payload(key, module, value)
            plain = dequantize(payload, torch.bfloat16)
            if not torch.equal(plain.float(), dequantize(payload)):
                raise ValueError(
                    f"'{key}' has scales from its original checkpoint that are not powers of two, "
                    "so BF16 cannot hold its values; use engine='fine-grained'"
                )
            yield parts[0].name, plain
        else:
            yield from _plain(value, dtype, parts)


def _folded(
    root: nn.Module, fold: AdapterFold
) -> Iterator[tuple[str, nn.Module, Tensor, torch.dtype, list[StoredPart]]]:
    """Yield (name, module, values, dtype for the engine, checkpoint parts) of tensors."""
    places = list(fold.walk(root))
    parts = model_parts(root, places)
    seen: set[int] = set()
    for name, module in places:
        for key, tensor in own_tensors(name, module):
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            own = key.rpartition(".")[2]
            value = fold(module, tensor, own)
            yield key, module, value, plain_dtype(root, key, tensor, tensor.dtype), parts[key]


def _plain(
    value: Tensor, dtype: torch.dtype, parts: list[StoredPart]
) -> Iterator[tuple[str, Tensor]]:
    value = dequantized(value)
    for part in parts:
        plain = part.of(value).detach().to(dtype)
        check_finite(part.name, plain)
        yield part.name, plain
