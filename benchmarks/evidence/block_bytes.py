"""Bytes that quantization adds to a whole Llama block's forward and backward, and its launches.

A converted Hugging Face decoder layer runs its real kernels in Triton's interpreter
(`evidence.launches`), and every load and store is counted, except those of GEMMs. The bytes that
the same block moves in BF16 between its GEMMs are subtracted: an RMSNorm, its backward, SwiGLU and
its backward are one kernel each, which reads each operand once and writes each result once. BF16
GEMMs need no cast. Attention, rotary angles and residuals are the same in both, and left out.

The layer is small. If a launcher asks whether its shape suits a card, it gets the answer
for `SHAPE`. `benchmarks.evidence.quantization_bytes` runs this and writes the rows.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

from benchmarks.evidence.launches import Launch, Recording, recorded  # before torch_fp8

# isort: split
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8
from torch_fp8.kernels import rms_norm as norm_kernels
from torch_fp8.kernels.arguments import BackwardInputs, NormBackwardInputs, NormWithRstd
from torch_fp8.ops import rms_norm, swiglu, swiglu_backward
from torch_fp8.tensor.split_weight import stored

BF16 = torch.bfloat16
TOKENS, HIDDEN, INNER, HEADS, GROUPS = 512, 512, 1792, 8, 2  # as Llama-3, at an eighth
SHAPE = (8192, 4096)
"""Tokens and features of Llama-3.1-8B, two sequences of 4,096."""
RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8")
CASE = "Llama block, training"


class Part(NamedTuple):
    """A tensor that linear layers take in FP8.

    Attributes:
        numel: number of its elements.
        in_bf16: bytes that BF16 moves to make it, and in backward from it.
    """

    numel: int
    in_bf16: int


@functools.cache
def parts() -> dict[str, Part]:
    """Describe every input and gradient by name; norms' backwards count toward their outputs."""
    rows, kv = TOKENS, HIDDEN * GROUPS // HEADS
    norm, product, product_backward = _bf16_norm(), *_bf16_product()
    return {
        "input of q, k, v": Part(rows * HIDDEN, norm),
        "gradients of q, k, v": Part(rows * (HIDDEN + 2 * kv), 0),
        "input of o": Part(rows * HIDDEN, 0),
        "gradient of o": Part(rows * HIDDEN, 0),
        "input of gate, up": Part(rows * HIDDEN, norm),
        "gradients of gate, up": Part(rows * 2 * INNER, product_backward),
        "input of down": Part(rows * INNER, product),
        "gradient of down": Part(rows * HIDDEN, 0),
    }


def rows(recipe: str) -> list[dict[str, object]]:
    """Return a row for each tensor, one for all of them, and one for the weights.

    Launches by torch outside of our operators are the same as in BF16.
    """
    launches = [k for k in count(recipe) if k.kind == "kernel" or k.within]
    of = parts()
    made, added, all_own = [], 0, []
    for name, part in of.items():
        own = [k for k in launches if k.sources == (name,)]
        more = sum(k.moved for k in own) - part.in_bf16
        asked = sum(k.requested for k in own) - part.in_bf16
        made.append(_row(recipe, name, more / part.numel, asked / part.numel, own))
        added, all_own = added + more, all_own + own
    weights = [k for k in launches if k.sources == ("weights",)]
    assert len(all_own) + len(weights) == len(launches), [
        (k.name, k.sources) for k in launches if k not in all_own and k not in weights
    ]
    numel = sum(part.numel for part in of.values())
    asked = sum(k.requested for k in all_own) - sum(part.in_bf16 for part in of.values())
    made.append(_row(recipe, "all inputs and gradients", added / numel, asked / numel, all_own))
    size = 2 * HIDDEN * (HIDDEN + HIDDEN * GROUPS // HEADS) + 3 * HIDDEN * INNER
    moved, asked = (sum(getattr(k, a) for k in weights) / size for a in ("moved", "requested"))
    return [*made, _row(recipe, "weights", moved, asked, weights)]


def _row(
    recipe: str, name: str, more: float, asked: float, launches: list[Launch]
) -> dict[str, object]:
    kinds = [launch.kind for launch in launches]
    return {
        "recipe": recipe,
        "case": CASE,
        "tensor": name,
        "bytes_per_element": f"{more:.3f}",
        "requested_per_element": f"{asked:.3f}",
        "kernels": kinds.count("kernel"),
        "torch_operators": kinds.count("torch"),
        "gemms": 0,
        "launched": " ".join(launch.name for launch in launches),
    }


@functools.cache
def count(recipe: str, smooth: bool = False) -> list[Launch]:
    """Return the launches of a training step, attributed to the names of `parts`.

    Args:
        smooth: with Smooth-SwiGLU.
    """
    torch.manual_seed(0)
    of_model = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        num_hidden_layers=1,
    )
    of_model._attn_implementation = "sdpa"
    layer, rotary = LlamaDecoderLayer(of_model, 0).bfloat16(), LlamaRotaryEmbedding(of_model)
    config = FP8Config(recipe=recipe, smooth_swiglu=smooth)
    for module in layer.modules():  # float32 weights, which the optimizer stores in two halves
        if isinstance(module, nn.Linear):
            module.float()
    convert_to_float8(layer, config)
    optimizer = torch.optim.AdamW(layer.parameters())
    convert_optimizer(optimizer, config, model=layer)
    x = torch.randn(1, TOKENS, HIDDEN, dtype=BF16, requires_grad=True)
    grad = torch.randn(1, TOKENS, HIDDEN, dtype=BF16)
    angles = rotary(x, torch.arange(TOKENS)[None])

    def step() -> None:
        layer(x, position_embeddings=angles).backward(grad)

    step()  # weights are known, and with the optimizer's step scales
    optimizer.step()
    layer.zero_grad()
    with _suits_a_card(), recorded() as recording:
        _name(layer, recording)
        step()
    return recording.launches


def _name(layer: nn.Module, recording: Recording) -> None:
    """Name the tensors of the block when they are created."""

    def input_of(module: nn.Module, name: str) -> None:
        module.register_forward_pre_hook(lambda m, args: recording.name(name, args[0]))

    def output_of(module: nn.Module, name: str) -> None:
        module.register_forward_hook(lambda m, args, y: recording.name(name, y))

    def gradient(tensor: Tensor, name: str) -> None:
        tensor.register_hook(lambda g: recording.name(name, g))

    def gradient_of(module: nn.Module, name: str) -> None:
        module.register_forward_hook(lambda m, args, y: gradient(y, name))

    attention, mlp = layer.self_attn, layer.mlp
    layer.input_layernorm.register_forward_pre_hook(
        lambda m, args: recording.name("input of q, k, v", args[0])
    )
    input_of(layer.post_attention_layernorm, "input of gate, up")
    input_of(attention.o_proj, "input of o")
    gradient_of(attention.o_proj, "gradient of o")
    for part in (attention.q_proj, attention.k_proj, attention.v_proj):
        gradient_of(part, "gradients of q, k, v")
    for part in (mlp.gate_proj, mlp.up_proj):
        output_of(part, "input of down")
    gradient_of(mlp.down_proj, "gradient of down")
    # What comes back through the product; its backward makes gradients of gate and up of it.
    mlp.down_proj.register_forward_pre_hook(
        lambda m, args: gradient(args[0], "gradients of gate, up")
    )
    linears = [m for m in layer.modules() if isinstance(m, nn.Linear)]
    recording.name("weights", [stored(m.weight) for m in linears])
    recording.ignore([b for m in linears for b in m.buffers()])


def _suits_a_card() -> mock._patch:
    """Let launchers decide as for `SHAPE`."""
    decide = norm_kernels.bands_fill_the_card

    def of_shape(x: Tensor, granularity: str) -> bool:
        assert x.shape == (TOKENS, HIDDEN)
        return decide(torch.empty(SHAPE, dtype=x.dtype, device="meta"), granularity)

    return mock.patch.object(norm_kernels, "bands_fill_the_card", of_shape)


def _moved(function: Callable[[], object]) -> int:
    with recorded() as recording:
        function()
    return sum(launch.moved for launch in recording.launches)


def _bf16_norm() -> int:
    """Return the bytes of an RMSNorm and its backward in BF16; one read also finds the
    statistics.
    """
    x, weight = torch.randn(TOKENS, HIDDEN).to(BF16), torch.ones(HIDDEN, dtype=BF16)
    rstd = torch.ones(TOKENS)
    forward = _moved(lambda: rms_norm.rms_norm(NormWithRstd(x, weight, rstd, 0.0, BF16)))
    arguments = (x.clone(), x, None, weight, rstd, 0.0, BF16, True)
    return forward + _moved(lambda: rms_norm.rms_norm_backward(NormBackwardInputs(*arguments)))


def _bf16_product() -> tuple[int, int]:
    """Return the bytes of SwiGLU and of its backward in BF16."""
    gate, up, grad = (torch.randn(TOKENS, INNER).to(BF16) for _ in range(3))
    inputs = BackwardInputs(grad, gate, None, up, None, BF16)
    return (
        _moved(lambda: swiglu.swiglu(gate, up, None)),
        _moved(lambda: swiglu_backward.swiglu_backward(inputs)),
    )
