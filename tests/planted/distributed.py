"""Faults in the exchanges between ranks."""

_TESTS = "tests/torch_fp8/distributed"
_DDP, _FSDP, _PARALLEL = f"{_TESTS}/ddp", f"{_TESTS}/fsdp", f"{_TESTS}/tensor_parallel"
FAULTS = {
    ("torch_fp8/distributed/agreement.py", "tests/torch_fp8/distributed/test_config_check.py"): (
        "a rank that missed a meeting gets its result in the next one",
        '        meetings.compare_set("ended", str(number), str(number + 1))\n',
        "",
    ),
    ("torch_fp8/distributed/ddp/fp8_grad_reducer.py", f"{_DDP}/test_wrap.py"): (
        "a rank that has joined writes the averages of the others",
        "        for parameter, grad in stored:\n            parameter.grad = grad\n",
        "",
    ),
    ("torch_fp8/distributed/ddp/buckets.py", f"{_DDP}/test_wrap.py"): (
        "a missing gradient becomes zeros on a rank where none had one",
        "                if not bool(flags.reshape(-1)[i]):\n                    continue\n",
        "",
        "ranks round an average with bits of their own part in the whole's place",
        "self._keys = shifted_keys(keys, dist.get_rank(group) * layout.num_values)",
        "self._keys = keys",
        "gradients that an optimizer gave back stay in 8 bits",
        "            if not self._slots[parameter].quantize:\n",
        "            if False:\n",
        "sums after an average are rounded as if there had been none",
        "            grad.rounding.exchange()\n",
        "",
    ),
    ("torch_fp8/distributed/ddp/buckets.py", f"{_DDP}/test_comm_hook.py"): (
        "gradients that have no 8-bit form are summed, not averaged",
        "        buffer.div_(self.world_size)\n        work = dist.all_reduce",
        "        work = dist.all_reduce",
    ),
    ("torch_fp8/distributed/ddp/connection.py", f"{_DDP}/test_wrap.py"): (
        "residuals of ranks stay different at the start",
        "                tensors += parameter.halves.tensors\n",
        "                tensors.append(parameter.halves.high)\n",
        "a cached weight outlives the broadcast that wrote it",
        "                parameter.halves.version = next(VERSIONS)\n",
        "",
    ),
    ("torch_fp8/distributed/averaging.py", f"{_DDP}/test_comm_hook.py {_FSDP}/test_replicas.py"): (
        "a run that would start within a group joins the one before",
        " and (not in_groups or (last.stop - last.start) % GROUP_SIZE == 0)\n",
        "\n",
    ),
    (
        "torch_fp8/distributed/fsdp/all_gather.py",
        f"{_FSDP}/test_connect.py {_FSDP}/test_unsharded_weight.py",
    ): (
        "an Inf of one rank's weight is lost in the common scale",
        "            amax = torch.where(amax.isfinite(), amax, torch.inf)\n",
        "",
    ),
    ("torch_fp8/distributed/fsdp/all_gather.py", f"{_FSDP}/test_connect.py"): (
        "FSDP2 gathers weights in FP8 for a forward in BF16",
        "module.runs_fp8 and not module.fp8.recipe.bf16_forward and self",
        "module.runs_fp8 and self",
    ),
    ("torch_fp8/optim/gradient_slot.py", f"{_DDP}/test_wrap.py"): (
        "hooks keep gradients from the exchange that averages them",
        "        if self.exchange is None or not self.exchange.ready(parameter):\n",
        "        if True:\n",
    ),
    ("torch_fp8/distributed/tensor_parallel/styles.py", f"{_PARALLEL}/test_styles.py"): (
        "tensor-parallel ranks gather inputs in FP8 for a forward in BF16",
        "    if module.fp8.recipe.bf16_forward:\n        return False\n",
        "",
    ),
    ("torch_fp8/distributed/fsdp/split_weights.py", f"{_FSDP}/test_scatters.py"): (
        "FSDP2 sums whole gradients of micro-batches in BF16",
        "        param.reduce_dtype = torch.float32\n",
        "        pass\n",
    ),
}
