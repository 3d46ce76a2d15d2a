"""Faults in layers and their autograd functions."""

_TESTS = "tests/torch_fp8/nn"
_PLAN = (
    "tests/torch_fp8_tools/plan/test_plan.py::"
    "test_predicted_bytes_are_those_of_a_trained_model[O2-llama]"
)
_MEMORY = f"{_TESTS}/test_input_group.py::test_gradients_take_the_memory_of_layers_apart"
FAULTS = {
    ("torch_fp8/nn/linear_function.py", "tests/torch_fp8/autograd/test_high_precision.py"): (
        "a gradient that is differentiated comes without that of the bias",
        "grad_bias = matrix(grad).sum(0, dtype=torch.float32).to(ctx.dtypes[2])",
        "grad_bias = None",
    ),
    ("torch_fp8/nn/linear_function.py", f"{_TESTS}/test_smooth_swiglu.py"): (
        "the weight's gradient is not divided by the smoothing factors",
        "grad_weight.mul_(inverse[:, None] if for_weight.transposed else inverse)\n",
        "pass\n",
    ),
    ("torch_fp8/nn/linear_function.py", f"{_TESTS}/test_bf16_forward.py"): (
        "a forward without gradients, as a reentrant checkpoint's first one, stays in FP8",
        "    if recipe.bf16_forward:\n        y, payloads",
        "    if recipe.bf16_forward and gradients:\n        y, payloads",
    ),
    ("torch_fp8/nn/delayed_scaling.py", f"{_TESTS}/test_delayed_layers.py"): (
        "evaluation records amaxes in a delayed layer's history",
        "return sources[:3] if layer.training else (*sources[3:], sources[GRAD_OUTPUT])",
        "return sources[:3]",
        "delayed scaling forgets the amax that a weight in two halves keeps",
        "amaxes[WEIGHT] = amaxes[WEIGHT] if current is None else current",
        "pass",
    ),
    (
        "torch_fp8/nn/delayed_scaling.py",
        f"{_TESTS}/test_delayed_layers.py tests/torch_fp8/test_default_dtype.py",
    ): (
        "a layer that moves keeps the rounded histories",
        "                setattr(layer, name, buffer.to(moved.device))\n",
        "                pass\n",
    ),
    ("torch_fp8/nn/delayed_scaling.py", f"{_TESTS}/test_graph_scales.py"): (
        "a step overwrites the scales that the backward of a graph will read",
        "if ran_in_graph() and not stays(scales) and is_saved(scales):",
        "if False:",
        "each step has scales elsewhere, for which a CUDA graph is recorded again",
        "not stays(scales) and is_saved(scales):",
        "not stays(scales):",
        "the host waits in each step of an eager model if another one was compiled",
        "layer.fp8.scaling.rule.eager or layer.fp8.scaling.saturation.traced",
        "layer.fp8.scaling.rule.eager or ran_in_graph()",
        "layers that share an input keep the scale of the first step",
        "recorded[:, INPUT] = shared_amaxes(recorded[:, INPUT], recorded[:, GRAD_OUTPUT])",
        "pass",
        "scales become known in eager code, which has recorded nothing",
        "and bool(activations.any())",
        "",
    ),
    ("torch_fp8/nn/scale_buffers.py", f"{_TESTS}/test_graph_scales.py"): (
        "other processes keep the scales of an earlier step",
        "return in_shared_memory(scales) or is",
        "return is",
        "a CUDA graph of a whole step writes its scales elsewhere",
        "in_shared_memory(scales) or is_capturing(scales.device)",
        "in_shared_memory(scales)",
        "each layer of a block has its scales in a tensor of its own",
        "apart and len(members) > 1",
        "False",
        "layers of two blocks hold their scales in one tensor, so no two blocks share a graph",
        "return layer.fp8.scaling.saturation, start and start[0]",
        "return layer.fp8.scaling.saturation",
    ),
    ("torch_fp8/quantization/scaling.py", f"{_TESTS}/test_graph_scales.py"): (
        "a graph saves views of the scales beside their table",
        "        scale.fp8_again = self.again\n",
        "",
    ),
    ("torch_fp8/ops/registry.py", "tests/benchmarks/test_compiled_block.py"): (
        "graphs launch the kernel of a norm's backward, which Inductor cannot join with sums",
        "in_graph = reference if fuses else launch",
        "in_graph = launch",
    ),
    ("torch_fp8/autograd/function.py", "tests/torch_fp8/autograd/test_saved_memory.py"): (
        "only a view of the scales counts as saved",
        "return count > alone or x._use_count() > 1",
        "return count > alone",
        "a view of the scales does not count as saved",
        "return count > alone or x._use_count() > 1",
        "return x._use_count() > 1",
    ),
    ("torch_fp8/nn/saturation.py", f"{_TESTS}/test_graph_scales.py"): (
        "what is not finite counts as saturated",
        "beyond = (recorded > limits * TOLERANCE) & recorded.isfinite()",
        "beyond = recorded > limits * TOLERANCE",
        "a step with current scales counts as saturated",
        "beyond = beyond & (not self.returns)",
        "pass",
        "the amax of a jump scales the next step",
        "return torch.where(beyond, 0, recorded)",
        "return recorded",
        "a jump is forgotten by a checkpoint",
        "self._set(number, bool(jumped))",
        "pass",
    ),
    ("torch_fp8/conversion/revert.py", f"{_TESTS}/test_graph_scales.py"): (
        "layers return to current scales each by itself",
        "        scaling.saturation = scalings[0].saturation\n",
        "",
    ),
    ("torch_fp8/tensor/quantizer.py", f"{_TESTS}/test_graph_scales.py"): (
        "graphs cast weights with a scale that nobody renews",
        "        if weight.spec.delayed:\n",
        "        if True:\n",
    ),
    ("torch_fp8/nn/layer_fp8.py", f"{_TESTS}/test_graph_scales.py"): (
        "eager code casts with the last step's scales",
        "return self.scaling if self.scaling is not None and self.scaling.rule.eager else None",
        "return self.scaling",
    ),
    ("torch_fp8/nn/layer_fp8.py", f"{_TESTS}/test_smooth_swiglu.py"): (
        "down projections have one scale for all channels",
        "return smooth_operands if self.recipe.smooth else plain_operands",
        "return plain_operands",
    ),
    (
        "torch_fp8/nn/rms_norm.py",
        f"{_TESTS}/test_rms_norm.py::test_frozen_layers_get_no_transposed_blocks",
    ): (
        "a norm casts in advance for a wgrad that nobody runs",
        "columnwise=col and quantizer.columnwise_usage",
        "columnwise=col",
    ),
    ("torch_fp8/nn/rms_norm.py", "tests/torch_fp8/compile/test_fused_casts.py"): (
        "in a graph, a norm computes its statistics apart from a cast with a known scale",
        "known = options.scale is not None or options",
        "known = options",
    ),
    ("torch_fp8/nn/merge_aware.py", f"{_TESTS}/test_merge_aware.py"): (
        "gradients of B of a merged adapter lack the scaling",
        "(x @ a.to(x.dtype).t())).to(b.dtype) * ctx.scaling",
        "(x @ a.to(x.dtype).t())).to(b.dtype)",
        "a merged weight is kept while its adapter's scaling changes",
        "version = (*versions, frozen.payload.version, adapter, self.scaling[adapter])",
        "version = (*versions, frozen.payload.version, adapter)",
    ),
    ("torch_fp8/nn/grouped_linear_function.py", f"{_TESTS}/test_expert_adapters.py"): (
        "the rows of a token are not added up in experts' backward",
        "moved = combine_rows(grad, index) if",
        "moved = grad[index[:, 0].clamp(min=0).long()] if",
    ),
    ("torch_fp8/nn/swiglu_function.py", "tests/torch_fp8/nn/test_delayed_producers.py"): (
        "in a graph, SwiGLU's backward raises the slot of one gradient for both",
        "slot = None if options.amax is None else other.slot",
        "slot = options.amax",
    ),
    ("torch_fp8/nn/swiglu_function.py", f"{_TESTS}/test_input_group.py"): (
        "gate and up get each other's gradients",
        "JoinedGradient(self.inputs, True)",
        "JoinedGradient(self.inputs, False)",
    ),
    ("torch_fp8/nn/swiglu_function.py", f"{_TESTS}/test_gated_mlp.py"): (
        "the gradients of gate and up are put side by side in 16 bits",
        "source.half = self._joined, i",
        "source.half = None",
    ),
    ("torch_fp8/nn/gated_mlp.py", "tests/torch_fp8/compile/test_fused_casts.py"): (
        "a graph casts the product of a gated MLP with the scale of gate's gradient",
        "ahead = quantizers(down, of_down).input",
        "ahead = quantizers(down, of_inputs[:5]).input",
    ),
    ("torch_fp8/nn/bf16_forward.py", f"{_TESTS}/test_bf16_forward.py"): (
        "a forward in BF16 saves its input in BF16",
        "    if not fp8_wgrad:\n        return y, InputPayloads(None, rows if wgrad else None",
        "    if wgrad:\n        return y, InputPayloads(None, rows if wgrad else None",
    ),
    ("torch_fp8/nn/linear.py", f"{_TESTS}/test_bf16_forward.py"): (
        "graphs keep the forward's precision that they were compiled with",
        "        self.fp8.recipe = recipe\n        self.fp8.run_emulated(self.fp8.emulate)\n",
        "        self.fp8.recipe = recipe\n        self.fp8.forget_quantizers()\n",
    ),
    ("torch_fp8/nn/expert_block.py", f"{_TESTS}/test_bf16_forward.py"): (
        "the activation of experts is rounded to FP8 in a forward in BF16",
        "        if in_bf16:\n            a =",
        "        if False:\n            a =",
    ),
    ("torch_fp8/nn/group_function.py", f"{_TESTS}/test_input_group.py"): (
        "members of a group get each other's gradients",
        "sorted({**self.outputs, i: grad}.items())",
        "{**self.outputs, i: grad}.items()",
        "gradients that arrive late are lost",
        "if not arrived or arrived[-1].is_cast:",
        "if not arrived:",
        "gradients of a group stay in memory",
        "        if not gradients.readers:\n",
        "        if False:\n",
        "a group multiplies for an input without gradient",
        "        if will_run(of_input):\n",
        "        if True:\n",
        "second derivatives of a group's weights are missing",
        "    if is_asked_for(ctx, 0):\n",
        "    if False:\n",
        "a group shows each monitor the first member's gradient",
        "        start = end\n",
        "        start = 0\n",
    ),
    ("torch_fp8/nn/group_function.py", _MEMORY): (
        "autograd copies the gradients of a group",
        "return self._rows.pop(i), grad_bias",
        "return self._rows[i], grad_bias",
    ),
    ("torch_fp8/nn/group_function.py", _PLAN): (
        "one gradient of a group keeps the memory of all",
        "if dtypes:  # several",
        "if False:  # several",
    ),
    ("torch_fp8/nn/input_group.py", f"{_TESTS}/test_input_group.py"): (
        "weights of a group are younger than their input, and stepped before dgrad reads them",
        "    return of_input, of_weights\n",
        (
            "    weights = [\n"
            "        GroupWeight.apply(weight, bias, i, exchange, shape, payloads)\n"
            "        for i, (weight, bias) in enumerate(parameters)\n"
            "    ]\n"
            "    return of_input, weights\n"
        ),
        "a graph casts a group's gradients with a scale that no step renews",
        "graph_buffers(members[0])",
        "graph_buffers(members[-1])",
        "a frozen layer stays in its group",
        "not weight.requires_grad or weight.is_inference()",
        "weight.is_inference()",
        "a group of layers with an input without gradient has one backward",
        "not (torch.is_grad_enabled() and x.requires_grad):",
        "not torch.is_grad_enabled():",
        "a group trains a weight that was replaced",
        "replaced = weight is not operands.weight or bias is not operands.bias",
        "replaced = False",
        "a layer of another dtype stays in its group",
        "options.out_dtype != of_group.out_dtype",
        "False",
    ),
    (
        "torch_fp8/nn/input_group.py",
        f"{_TESTS}/test_input_group.py::test_a_layer_that_was_replaced_is_freed",
    ): (
        "a group keeps a layer that was replaced",
        'weakref.ref(layer) for layer in state["layers"]',
        'lambda layer=layer: layer for layer in state["layers"]',
    ),
    ("torch_fp8/ops/side_by_side.py", f"{_TESTS}/test_input_group.py"): (
        "weights of a group are cast with the first one's scale",
        "torch.stack([s for s in (scale_a, scale_b, scale_c) if s is not None]).amax()",
        "scale_a",
    ),
    ("torch_fp8/conversion/fused_layers.py", f"{_TESTS}/test_input_group.py"): (
        "gate and up have a backward each",
        "if len(layers) > 1 and all(map(_can_share, layers)):",
        "if False:",
        "blocks whose layers have the same names share a group",
        "key = tuple(map(id, readers))",
        "key = (len(readers),)",
    ),
    ("torch_fp8/optim/gradient_slot.py", _MEMORY): (
        "gradients of a group stay in 16 bits at O3",
        "_is_part(grad) and grad._version:",
        "_is_part(grad):",
    ),
}
