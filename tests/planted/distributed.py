"""Faults in the exchanges between ranks."""

from tests.planted.fault import Fault

_DDP, _FSDP = "tests/torch_fp8/distributed/ddp", "tests/torch_fp8/distributed/fsdp"
FAULTS = [
    Fault(
        "a rank that missed a meeting gets its result in the next one",
        "torch_fp8/distributed/agreement.py",
        '        meetings.compare_set("ended", str(number), str(number + 1))\n',
        "",
        "tests/torch_fp8/distributed/test_config_check.py",
    ),
    Fault(
        "a rank that has joined writes the averages of the others",
        "torch_fp8/distributed/ddp/fp8_grad_reducer.py",
        "        for parameter, grad in stored:\n            parameter.grad = grad\n",
        "",
        f"{_DDP}/test_wrap.py",
    ),
    Fault(
        "a missing gradient becomes zeros on a rank where none had one",
        "torch_fp8/distributed/ddp/fp8_grad_bucket.py",
        "                if not bool(flags.reshape(-1)[i]):\n                    continue\n",
        "",
        f"{_DDP}/test_wrap.py",
    ),
    Fault(
        "ranks round an average with bits of their own part in the whole's place",
        "torch_fp8/distributed/ddp/fp8_grad_bucket.py",
        "self._keys = shifted_keys(keys, dist.get_rank(group) * layout.num_values)",
        "self._keys = keys",
        f"{_DDP}/test_wrap.py",
    ),
    Fault(
        "sums after an average are rounded as if there had been none",
        "torch_fp8/distributed/ddp/fp8_grad_bucket.py",
        "            grad.rounding.exchange()\n",
        "",
        f"{_DDP}/test_wrap.py",
    ),
    Fault(
        "gradients that have no 8-bit form are summed, not averaged",
        "torch_fp8/distributed/ddp/comm_hook.py",
        "        buffer.div_(self.world_size)\n        work = dist.all_reduce",
        "        work = dist.all_reduce",
        f"{_DDP}/test_comm_hook.py",
    ),
    Fault(
        "residuals of ranks stay different at the start",
        "torch_fp8/distributed/ddp/connection.py",
        "                tensors += parameter.halves.tensors\n",
        "                tensors.append(parameter.halves.high)\n",
        f"{_DDP}/test_wrap.py",
    ),
    Fault(
        "a cached weight outlives the broadcast that wrote it",
        "torch_fp8/distributed/ddp/connection.py",
        "                parameter.halves.version = next(VERSIONS)\n",
        "",
        f"{_DDP}/test_wrap.py",
    ),
    Fault(
        "a run that would start within a group joins the one before",
        "torch_fp8/distributed/averaging.py",
        " and (not in_groups or (last.stop - last.start) % GROUP_SIZE == 0)\n",
        "\n",
        f"{_DDP}/test_comm_hook.py {_FSDP}/test_replicas.py",
    ),
    Fault(
        "an Inf of one rank's weight is lost in the common scale",
        "torch_fp8/distributed/fsdp/all_gather.py",
        "        amax = torch.where(amax.isfinite(), amax, torch.inf)\n",
        "",
        f"{_FSDP}/test_connect.py {_FSDP}/test_unsharded_weight.py",
    ),
    Fault(
        "hooks keep gradients from the exchange that averages them",
        "torch_fp8/optim/gradient_slot.py",
        "        if self.exchange is None or not self.exchange.ready(parameter):\n",
        "        if True:\n",
        f"{_DDP}/test_wrap.py",
    ),
    Fault(
        "FSDP2 gathers weights in FP8 for a forward in BF16",
        "torch_fp8/distributed/fsdp/all_gather.py",
        "module.runs_fp8 and not module.fp8.recipe.bf16_forward and self",
        "module.runs_fp8 and self",
        "tests/torch_fp8/distributed/fsdp/test_connect.py",
    ),
    Fault(
        "tensor-parallel ranks gather inputs in FP8 for a forward in BF16",
        "torch_fp8/distributed/tensor_parallel/styles.py",
        "    if module.fp8.recipe.bf16_forward:\n        return False\n",
        "",
        "tests/torch_fp8/distributed/tensor_parallel/test_styles.py",
    ),
    Fault(
        "FSDP2 sums whole gradients of micro-batches in BF16",
        "torch_fp8/distributed/fsdp/split_weights.py",
        "        param.reduce_dtype = torch.float32\n",
        "        pass\n",
        f"{_FSDP}/test_connect.py",
    ),
]
