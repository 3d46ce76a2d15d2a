"""Faults in output layers whose logits are computed when they are read."""

_TESTS = "tests/torch_fp8/loss_head"
_READS, _LOSSES = f"{_TESTS}/test_logits_reads.py", f"{_TESTS}/test_logits_losses.py"
_BREAKS = f"{_TESTS}/test_head_graph_breaks.py"
_GRAPHS = f"{_TESTS}/test_head_compiled.py"
_FROZEN, _RANKS = f"{_TESTS}/test_frozen_head.py", f"{_TESTS}/test_head_ranks.py"
FAULTS = {
    ("torch_fp8/nn/head_call.py", _READS): (
        "logits are computed in the grad mode of their reader",
        "        grad_mode = self.requires_grad and not self.is_written\n",
        "        grad_mode = torch.is_grad_enabled() and not self.is_written\n",
        "logits are computed in the autocast state of their reader",
        "        with torch.autocast(**self.autocast):\n            return",
        "        if True:\n            return",
        "a weight that was written is multiplied all the same",
        "        if not self.is_unchanged():\n            raise",
        "        if False:\n            raise",
        "weights are not copied before a step writes them",
        "        await_step(self)\n",
        "",
    ),
    ("torch_fp8/nn/lazy_logits.py", _READS): (
        "an in-place write reaches logits that were copied before it",
        "            map_tensors((args, kwargs), _compute_all)\n",
        "            pass\n",
    ),
    ("torch_fp8/nn/lazy_logits.py", _GRAPHS): (
        "logits that left a graph have no node in the graph of autograd",
        "                _Handle.apply(self, call.hidden, call.weight, call.bias, logits)\n",
        "                pass\n",
    ),
    ("torch_fp8/nn/lazy_logits.py", _BREAKS): (
        "functions that are compiled fail in methods of uncomputed logits that are in Python",
        "        setattr(LazyLogits, _name, torch._disable_dynamo(_method))\n",
        "        pass\n",
    ),
    ("torch_fp8/nn/logit_losses.py", _READS): (
        "a fused loss skips the backward of a program's own function",
        "or not all(map(_passes_gradients, nodes)):",
        "or False:",
        "FSDP2's hook on outputs waits for a gradient of the logits",
        "    for hook in call.begins if loss.requires_grad else ():\n        loss.reg",
        "    for hook in ():\n        loss.reg",
    ),
    ("torch_fp8/nn/logit_losses.py", _FROZEN): (
        "the monitor does not see the operands of an output layer",
        "            _show(call, tokens, labels, ignore_index)\n",
        "            pass\n",
        "the monitor computes the logits of all tokens",
        "max(1, -(-len(tokens) // _OBSERVED))",
        "1",
    ),
    ("torch_fp8/nn/logit_losses.py", _LOSSES): (
        "a detached loss trains the weight",
        "    if not of.requires_grad:\n        head = ",
        "    if False:\n        head = ",
    ),
    ("torch_fp8/nn/logit_losses.py", f"{_TESTS}/test_head_ranks.py"): (
        "the loss of the last rank's first step is not averaged under a static graph",
        "    for logits in nodes if loss.requires_grad else ():\n        loss = ",
        "    for logits in ():\n        loss = ",
    ),
    ("torch_fp8/nn/logit_steps.py", _READS): (
        "an index that reaches the classes takes hidden features",
        "    if sum(_num_dims(item) for item in items) >= x.ndim:\n        return NotImplemented\n",
        "",
        "a view that moves classes into tokens is recorded",
        "if not is_last or shape_of.dtype",
        "if shape_of.dtype",
    ),
    ("torch_fp8/nn/logit_steps.py", _LOSSES): (
        "a division multiplies",
        "1 / number if func in _DIVISIONS else number",
        "number",
    ),
    ("torch_fp8/nn/logit_steps.py", _GRAPHS): (
        "a mask's rows are taken for known in a graph",
        "    if torch.compiler.is_compiling() and any(map(_is_mask, items)):\n",
        "    if False:\n",
    ),
    ("torch_fp8/nn/logit_steps.py", _BREAKS): (
        "detached logits stay uncomputed in a graph",
        "    if torch.compiler.is_compiling():  # what a program keeps leaves the graph\n",
        "    if False:\n",
    ),
    (
        "torch_fp8/conversion/output_layers.py",
        f"{_TESTS}/test_head_models.py::test_options_and_the_summary",
    ): (
        "a pattern of the user that names the head does not count",
        "        if named or high_precision_pattern(name, config) or",
        "        if high_precision_pattern(name, config) or",
    ),
    ("torch_fp8/conversion/output_layers.py", _FROZEN): (
        "the reference of a trained model has another output layer",
        "and (trains or isinstance(module, Float8Layer))",
        "",
        "an override of an output layer's products is not run in its loss",
        "getattr(own, option) != getattr(config, option)",
        "False",
    ),
    (
        "torch_fp8/conversion/convert.py",
        "tests/torch_fp8/conversion/test_autotune.py::test_output_layers_in_fp8_are_not_measured",
    ): (
        "a measurement computes all logits of an output layer",
        "if n not in heads and is_linear(products[n])",
        "if is_linear(products[n])",
    ),
    ("torch_fp8/conversion/frozen_layers.py", _FROZEN): (
        "a frozen output layer is stored with scales that its loss does not take",
        "isinstance(module, OutputLayer) and payload is None",
        "False",
    ),
    ("torch_fp8/nn/output_layer.py", _FROZEN): (
        "an output layer in FP8 counts as bypassed",
        "            self.fp8.called = True\n        return self.logits_of(x)",
        "            pass\n        return self.logits_of(x)",
        "an output layer that was unfrozen trains in FP8 in silence",
        "            _warn_of_training(head.name)\n",
        "            pass\n",
    ),
    ("torch_fp8/nn/output_layer.py", _RANKS): (
        "an output layer that FSDP2 gathers in FP8 has its logits in memory",
        "(fp8 and not in_graph and isinstance(weight, QuantizableTensor))",
        "False",
    ),
    ("torch_fp8/nn/head_call.py", _RANKS): (
        "a read after backward leaves FSDP2's weight gathered, so that a forward runs old values",
        "                gathered.reshard()\n",
        "                pass\n",
        "logits of before a step are computed with the shards of after it",
        "            self.is_lost = True\n",
        "            pass\n",
    ),
    ("torch_fp8/nn/graph_logits.py", _GRAPHS): (
        "a loss in a graph ignores that its logits were written",
        "        x.recorded.call.is_read = True\n",
        "        pass\n",
    ),
    ("torch_fp8/nn/graph_logits.py", _BREAKS): (
        "logits that are alive at a graph break keep their class",
        "        result.is_plain_outside = True\n",
        "",
    ),
    ("torch_fp8/nn/deferred_logits.py", _GRAPHS): (
        "logits that leave a graph lose the steps after their layer",
        "call.layer, call.hidden, call.autocast, x.recorded.steps",
        "call.layer, call.hidden, call.autocast, ()",
        "logits that leave a graph are computed in the autocast state outside",
        "layer.logits_of(hidden, autocast)",
        "layer.logits_of(hidden)",
        "logits leave a part of a graph as if they left the graph",
        "_frames_from(*DEFERRING) == 1",
        "_frames_from(*DEFERRING) > 0",
        "a compiled model keeps its logits in the graph",
        "return _leaving(output) if leaves else output",
        "return output",
        "a forward that is replaced in the class later does not run",
        "forward if is_own else type(self).forward",
        "forward",
        "a function around a model, and what follows a break, have logits and a loss without them",
        "_frames_from(*DEFERRING) > 0 or",
        "True or",
    ),
    ("torch_fp8/nn/deferred_logits.py", _BREAKS): (
        "the rest of a step after a graph break has logits",
        "frame.filename == file and name in frame.name",
        "frame.filename == file and name == frame.name",
    ),
}
