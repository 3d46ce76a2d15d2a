"""Faults in output layers whose logits are computed when they are read."""

from tests.planted.fault import Fault

_TESTS = "tests/torch_fp8/loss_head"
_READS, _LOSSES = f"{_TESTS}/test_logits_reads.py", f"{_TESTS}/test_logits_losses.py"
_GRAPHS = f"{_TESTS}/test_head_compiled.py"
FAULTS = [
    Fault(
        "logits are computed in the grad mode of their reader",
        "torch_fp8/nn/head_call.py",
        "with torch.set_grad_enabled(self.requires_grad and not self.is_written):",
        "with torch.set_grad_enabled(torch.is_grad_enabled() and not self.is_written):",
        _READS,
    ),
    Fault(
        "logits are computed in the autocast state of their reader",
        "torch_fp8/nn/head_call.py",
        "        with torch.autocast(**self.autocast):\n            return",
        "        if True:\n            return",
        _READS,
    ),
    Fault(
        "a weight that was written is multiplied all the same",
        "torch_fp8/nn/head_call.py",
        "        if not self.is_unchanged():\n            raise",
        "        if False:\n            raise",
        _READS,
    ),
    Fault(
        "weights are not copied before a step writes them",
        "torch_fp8/nn/head_call.py",
        "        await_step(self)\n",
        "",
        _READS,
    ),
    Fault(
        "an in-place write reaches logits that were copied before it",
        "torch_fp8/nn/lazy_logits.py",
        "            map_tensors((args, kwargs), _compute_all)\n",
        "            pass\n",
        _READS,
    ),
    Fault(
        "a fused loss skips the backward of a program's own function",
        "torch_fp8/nn/logit_losses.py",
        "or not all(map(_passes_gradients, nodes)):",
        "or False:",
        _READS,
    ),
    Fault(
        "a detached loss trains the weight",
        "torch_fp8/nn/logit_losses.py",
        "    if not of.requires_grad:\n        head = ",
        "    if False:\n        head = ",
        _LOSSES,
    ),
    Fault(
        "an index that reaches the classes takes hidden features",
        "torch_fp8/nn/logit_steps.py",
        "    if num_dims >= x.ndim:\n        return NotImplemented\n",
        "",
        _READS,
    ),
    Fault(
        "a view that moves classes into tokens is recorded",
        "torch_fp8/nn/logit_steps.py",
        "if not is_last or shape_of.dtype",
        "if shape_of.dtype",
        _READS,
    ),
    Fault(
        "a division multiplies",
        "torch_fp8/nn/logit_steps.py",
        "1 / number if func in _DIVISIONS else number",
        "number",
        _LOSSES,
    ),
    Fault(
        "FSDP2's hook on outputs waits for a gradient of the logits",
        "torch_fp8/nn/logit_losses.py",
        "    for hook in call.begins if loss.requires_grad else ():\n        loss.reg",
        "    for hook in ():\n        loss.reg",
        _READS,
    ),
    Fault(
        "the loss of the last rank's first step is not averaged under a static graph",
        "torch_fp8/nn/logit_losses.py",
        "    for logits in nodes if loss.requires_grad else ():\n        loss = ",
        "    for logits in ():\n        loss = ",
        f"{_TESTS}/test_head_ranks.py",
    ),
    Fault(
        "a pattern of the user that names the head does not count",
        "torch_fp8/conversion/output_layers.py",
        "        if named or high_precision_pattern(name, config) is not None:",
        "        if high_precision_pattern(name, config) is not None:",
        f"{_TESTS}/test_head_models.py::test_options_and_the_summary",
    ),
    Fault(
        "a loss in a graph ignores that its logits were written",
        "torch_fp8/nn/graph_logits.py",
        "        x.recorded.call.is_read = True\n",
        "        pass\n",
        _GRAPHS,
    ),
    Fault(
        "logits that leave a graph lose the steps after their layer",
        "torch_fp8/nn/deferred_logits.py",
        "        return Deferred(call.layer, call.hidden, call.autocast, x.recorded.steps)",
        "        return Deferred(call.layer, call.hidden, call.autocast, ())",
        _GRAPHS,
    ),
    Fault(
        "logits that leave a graph are computed in the autocast state outside",
        "torch_fp8/nn/deferred_logits.py",
        "self.layer.logits_of(self.hidden, self.autocast)",
        "self.layer.logits_of(self.hidden)",
        _GRAPHS,
    ),
    Fault(
        "a model that another wrapper compiles returns hidden states",
        "torch_fp8/nn/deferred_logits.py",
        "            head.fuses_in_graphs = False\n",
        "            pass\n",
        _GRAPHS,
    ),
    Fault(
        "a compiled model keeps its logits in the graph",
        "torch_fp8/nn/deferred_logits.py",
        "return _mapped(output, _deferred) if torch.compiler.is_compiling() else output",
        "return output",
        _GRAPHS,
    ),
    Fault(
        "a part that is compiled alone returns logits that are computed six times",
        "torch_fp8/nn/deferred_logits.py",
        "for m, h in _heads(model) if id(m) not in inside",
        "for m, h in _heads(model)",
        _GRAPHS,
    ),
    Fault(
        "a mask's rows are taken for known in a graph",
        "torch_fp8/nn/logit_steps.py",
        "    if torch.compiler.is_compiling() and any(map(_is_mask, items)):\n",
        "    if False:\n",
        _GRAPHS,
    ),
]
