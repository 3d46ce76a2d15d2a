"""Faults in layers and their autograd functions."""

from tests.planted.fault import Fault

_TESTS = "tests/torch_fp8/nn"
FAULTS = [
    Fault(
        "a gradient that is differentiated comes without that of the bias",
        "torch_fp8/nn/linear_function.py",
        "grad_bias = matrix(grad).sum(0, dtype=torch.float32).to(ctx.dtypes[2])",
        "grad_bias = None",
        "tests/torch_fp8/autograd/test_high_precision.py",
    ),
    Fault(
        "the weight's gradient is not divided by the smoothing factors",
        "torch_fp8/nn/linear_function.py",
        "grad_weight.mul_(inverse[:, None] if for_weight.transposed else inverse)\n",
        "pass\n",
        f"{_TESTS}/test_smooth_swiglu.py",
    ),
    Fault(
        "evaluation records amaxes in a delayed layer's history",
        "torch_fp8/nn/delayed_scaling.py",
        "return sources[:3] if layer.training else (*sources[3:], sources[GRAD_OUTPUT])",
        "return sources[:3]",
        f"{_TESTS}/test_delayed_layers.py",
    ),
    Fault(
        "a layer that moves keeps the rounded histories",
        "torch_fp8/nn/delayed_scaling.py",
        "                setattr(layer, name, buffer.to(moved.device))\n",
        "                pass\n",
        f"{_TESTS}/test_delayed_layers.py tests/torch_fp8/test_default_dtype.py",
    ),
    Fault(
        "delayed scaling forgets the amax that a weight in two halves keeps",
        "torch_fp8/nn/delayed_scaling.py",
        "amaxes[WEIGHT] = amaxes[WEIGHT] if current is None else current",
        "pass",
        f"{_TESTS}/test_delayed_layers.py",
    ),
    Fault(
        "in a graph, a norm computes its statistics apart from a cast with a known scale",
        "torch_fp8/nn/rms_norm.py",
        "known = options.scale is not None or options",
        "known = options",
        "tests/torch_fp8/compile/test_fused_casts.py",
    ),
    Fault(
        "gradients of B of a merged adapter lack the scaling",
        "torch_fp8/nn/merge_aware.py",
        "(x @ a.to(x.dtype).t())).to(b.dtype) * ctx.scaling",
        "(x @ a.to(x.dtype).t())).to(b.dtype)",
        f"{_TESTS}/test_merge_aware.py",
    ),
    Fault(
        "a merged weight is kept while its adapter's scaling changes",
        "torch_fp8/nn/merge_aware.py",
        "version = (*versions, frozen.payload.version, adapter, self.scaling[adapter])",
        "version = (*versions, frozen.payload.version, adapter)",
        f"{_TESTS}/test_merge_aware.py",
    ),
    Fault(
        "the rows of a token are not added up in experts' backward",
        "torch_fp8/nn/grouped_linear_function.py",
        "        return combine_rows(grad, row), None, None  # (R, K) -> (T, K)",
        "        return grad[row[:, 0].clamp(min=0).long()], None, None",
        f"{_TESTS}/test_expert_adapters.py",
    ),
    Fault(
        "in a graph, SwiGLU's backward raises the slot of one gradient for both",
        "torch_fp8/nn/swiglu_function.py",
        "slot = None if options.amax is None else other.slot",
        "slot = options.amax",
        "tests/torch_fp8/nn/test_delayed_producers.py",
    ),
    Fault(
        "a graph casts the product of a gated MLP with the scale of gate's gradient",
        "torch_fp8/nn/gated_mlp.py",
        "ahead = known_quantizers(down, first, training, of_down).input",
        "ahead = known_quantizers(down, first, training, of_inputs[:4]).input",
        "tests/torch_fp8/compile/test_fused_casts.py",
    ),
    Fault(
        "a forward without gradients, as a reentrant checkpoint's first one, stays in FP8",
        "torch_fp8/nn/linear_function.py",
        "    if recipe.bf16_forward:\n        y, payloads",
        "    if recipe.bf16_forward and gradients:\n        y, payloads",
        f"{_TESTS}/test_bf16_forward.py",
    ),
    Fault(
        "a forward in BF16 saves its input in BF16",
        "torch_fp8/nn/bf16_forward.py",
        "    if not fp8_wgrad:\n        return y, InputPayloads(None, rows if wgrad else None",
        "    if wgrad:\n        return y, InputPayloads(None, rows if wgrad else None",
        f"{_TESTS}/test_bf16_forward.py",
    ),
    Fault(
        "graphs keep the forward's precision that they were compiled with",
        "torch_fp8/nn/linear.py",
        "        self.fp8.recipe = recipe\n        self.fp8.run_emulated(self.fp8.emulate)\n",
        "        self.fp8.recipe = recipe\n        self.fp8.forget_quantizers()\n",
        f"{_TESTS}/test_bf16_forward.py",
    ),
    Fault(
        "the activation of experts is rounded to FP8 in a forward in BF16",
        "torch_fp8/nn/expert_block.py",
        "        if in_bf16:\n            a =",
        "        if False:\n            a =",
        f"{_TESTS}/test_bf16_forward.py",
    ),
]
