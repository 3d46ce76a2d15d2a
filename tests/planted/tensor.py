"""Faults in tensor subclasses and caches."""

from tests.planted.fault import Fault

_TESTS = "tests/torch_fp8/tensor"
FAULTS = [
    Fault(
        "a weight that has moved without gradients names no stored part",
        "torch_fp8/tensor/split_weight.py",
        """    def stored_part(self) -> Tensor:
        return self.halves.high
""",
        "",
        "tests/torch_fp8/tensor/test_weight_properties.py",
    ),
    Fault(
        "a payload is kept after its producer's input was written",
        "torch_fp8/tensor/producer.py",
        "        if self.written_by is not None:\n            self._check_written()\n"
        "        slot = quantizer",
        "        slot = quantizer",
        f"{_TESTS}/test_lazy_quantized.py",
    ),
    Fault(
        "the second reader's slot is not raised",
        "torch_fp8/tensor/producer.py",
        "            quantizer.source.record(self.amax())\n            self.raised.append(slot)",
        "            self.raised.append(slot)",
        f"{_TESTS}/test_lazy_quantized.py tests/torch_fp8/nn/test_delayed_producers.py",
    ),
    Fault(
        "the second reader of a norm with delayed scaling records no amax",
        "torch_fp8/tensor/producer.py",
        "follows = not (new_row or new_col or quantizer.spec.delayed) and bool(self.raised)",
        "follows = not (new_row or new_col) and bool(self.raised)",
        f"{_TESTS}/test_lazy_quantized.py tests/torch_fp8/nn/test_delayed_producers.py",
    ),
    Fault(
        "each rank casts its part of an input with a scale of its own",
        "torch_fp8/tensor/producer.py",
        "if scale is None and quantizer.group is not None:",
        "if False:",
        f"{_TESTS}/test_lazy_quantized.py",
    ),
    Fault(
        "a frozen weight's copy keeps the old scale",
        "torch_fp8/tensor/frozen_weight.py",
        "        payload.scale.copy_(source.scale)\n    return weight",
        "    return weight",
        f"{_TESTS}/test_frozen_weight.py",
    ),
    Fault(
        "a frozen weight's copy writes the memory that another model shares",
        "torch_fp8/tensor/frozen_weight.py",
        "        payload.take_own_memory()\n        payload.version",
        "        payload.version",
        f"{_TESTS}/test_frozen_weight.py tests/torch_fp8/conversion/test_share_frozen.py",
    ),
    Fault(
        "a clamp of an 8-bit gradient exceeds its bound",
        "torch_fp8/tensor/float8_grad.py",
        "    grad.store(grad.dequantize().div_(unit).clamp_(*relative))\n"
        "    grad.multiplier.fill_(unit)",
        "    grad.store(grad.dequantize().clamp_(min, max))",
        f"{_TESTS}/test_float8_grad.py",
    ),
    Fault(
        "an 8-bit gradient that is copied shares the copy's random bits",
        "torch_fp8/tensor/float8_grad.py",
        "return Float8Grad(parts, self.shape, self.dtype, self.rounding.copy())",
        "return Float8Grad(parts, self.shape, self.dtype, self.rounding)",
        f"{_TESTS}/test_float8_grad.py",
    ),
    Fault(
        "the payload of a weight is that of the step before",
        "torch_fp8/optim/step.py",
        """            if matrix.payload is not None:
                halves.filled = halves.version
""",
        "            halves.filled = halves.version\n",
        f"{_TESTS}/test_payload_cache.py",
    ),
    Fault(
        "the payload of a weight is not cast again after other code has written it",
        "torch_fp8/tensor/halves.py",
        "return self.filled == self.version and not in_shared_memory(self.high)",
        "return bool(self.filled) and not in_shared_memory(self.high)",
        f"{_TESTS}/test_payload_cache.py",
    ),
    Fault(
        "the payload of a weight in shared memory is kept",
        "torch_fp8/tensor/halves.py",
        "return self.filled == self.version and not in_shared_memory(self.high)",
        "return self.filled == self.version",
        f"{_TESTS}/test_payload_cache.py {_TESTS}/test_shared_parts.py",
    ),
    Fault(
        "a payload moves when it is cast again",
        "torch_fp8/tensor/halves.py",
        """            for old, new in zip(self.payload[:2], cast(self)[:2], strict=True):
                old.data.copy_(new)
""",
        "            self.payload = cast(self)\n",
        f"{_TESTS}/test_payload_cache.py",
    ),
    Fault(
        "backward reads a payload that was written since",
        "torch_fp8/tensor/quantizer.py",
        "halves.payload if cast.serves_backward and weight.halves.is_filled else None",
        "halves.payload if cast.serves_backward else None",
        f"{_TESTS}/test_payload_cache.py",
    ),
    Fault(
        "backward transposes a weight's bytes with scales of rows",
        "torch_fp8/tensor/quantizer.py",
        "halves.payload if cast.serves_backward and weight.halves.is_filled else None",
        "halves.payload if weight.halves.is_filled else None",
        f"{_TESTS}/test_payload_cache.py",
    ),
    Fault(
        "a graph transposes a payload in forward",
        "torch_fp8/tensor/dgrad_operands.py",
        "    return g, g_t, sums, for_weight.for_dgrad(weight, scale, after)\n",
        "    return g, g_t, sums, for_weight.for_dgrad(weight, scale)\n",
        f"{_TESTS}/test_payload_cache.py",
    ),
    Fault(
        "a payload that is transposed beside a cast gets the cast's scale",
        "torch_fp8/ops/quantize_beside.py",
        "payload._replace(qdata=qdata)",
        "payload._replace(qdata=qdata, scale=layouts[1])",
        f"{_TESTS}/test_payload_cache.py",
    ),
    Fault(
        "a cast beside a transpose leaves the gradient's transpose out",
        "torch_fp8/tensor/dgrad_operands.py",
        "quantizer.options(x, rowwise=True, columnwise=columnwise)",
        "quantizer.options(x, rowwise=True, columnwise=False)",
        f"{_TESTS}/test_payload_cache.py",
    ),
    Fault(
        "a payload stored as (K, N) is transposed, too",
        "torch_fp8/tensor/dgrad_operands.py",
        "None if for_weight.transposed else for_weight.kept_payload(weight)",
        "for_weight.kept_payload(weight)",
        f"{_TESTS}/test_payload_cache.py",
    ),
    Fault(
        "the amax that a weight keeps is not measured again after other code has written it",
        "torch_fp8/tensor/halves.py",
        "(self.measured != self.version or in_shared_memory(self.high))",
        "(not self.measured or in_shared_memory(self.high))",
        f"{_TESTS}/test_payload_cache.py",
    ),
    Fault(
        "the amax of a weight in shared memory is kept",
        "torch_fp8/tensor/halves.py",
        "(self.measured != self.version or in_shared_memory(self.high))",
        "self.measured != self.version",
        f"{_TESTS}/test_payload_cache.py",
    ),
    Fault(
        "an optimizer's step raises the amax of the step before",
        "torch_fp8/optim/step.py",
        "        torch._foreach_copy_(amaxes, [torch.zeros_like(amaxes[0])] * len(amaxes))",
        "        pass",
        f"{_TESTS}/test_payload_cache.py",
    ),
    Fault(
        "an average that is copied into a frozen weight is lost in silence",
        "torch_fp8/tensor/frozen_weight.py",
        "is_small = wanted.square().sum() < _ROUNDING**2 * values.square().sum()",
        "is_small = wanted.square().sum() < 0",
        "tests/torch_fp8/tensor/test_frozen_weight.py",
    ),
    Fault(
        "a copied 8-bit gradient rounds again with its first bits",
        "torch_fp8/ops/grad_codec.py",
        "        twin.count, twin.exchanges = self.count, self.exchanges\n",
        "",
        "tests/torch_fp8/tensor/test_float8_grad.py",
    ),
    Fault(
        "the gradient of a graph from before the split replaces the sum",
        "torch_fp8/tensor/exchange.py",
        "parameter.grad = grad if before is None else plain(before) + grad",
        "parameter.grad = grad",
        "tests/torch_fp8/tensor/test_wide_grad.py",
    ),
    Fault(
        "a recorded weight that moves keeps its old halves",
        "torch_fp8/tensor/split_weight.py",
        "            torch.Tensor.data.__set__(self, _parameter(x.halves, self))\n"
        "            self.halves = x.halves\n",
        "            torch.Tensor.data.__set__(self, _parameter(x.halves, self))\n",
        "tests/torch_fp8/tensor/test_swap.py",
    ),
    Fault(
        "the address of an alias is that of a copy from before a write",
        "torch_fp8/tensor/split_weight.py",
        "known[1]() if known is not None and known[0] == self.halves.version else None",
        "known[1]() if known is not None else None",
        "tests/torch_fp8/tensor/test_split_weight.py",
    ),
    Fault(
        "a shard that moves loses the bits that user code wrote",
        "torch_fp8/tensor/split_shard.py",
        "SplitShard(Halves(high, old.residual, old.bits), padded)",
        "SplitShard(Halves(high, old.residual, RESIDUAL_BITS), padded)",
        "tests/torch_fp8/tensor/test_split_weight.py",
    ),
]
