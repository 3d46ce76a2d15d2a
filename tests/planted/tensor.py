"""Faults in tensor subclasses and caches."""

_TESTS = "tests/torch_fp8/tensor"
FAULTS = {
    ("torch_fp8/tensor/split_weight.py", "tests/torch_fp8/tensor/test_weight_properties.py"): (
        "a weight that has moved without gradients names no stored part",
        (
            """    def stored_part(self) -> Tensor:
        return self.halves.high
"""
        ),
        "",
    ),
    ("torch_fp8/tensor/split_weight.py", "tests/benchmarks/test_host_time.py"): (
        "a graph reads payloads through one more function",
        'property(operator.attrgetter("halves.graph_codes"))',
        "property(lambda self: self.halves.graph_codes)",
    ),
    ("torch_fp8/tensor/split_weight.py", "tests/torch_fp8/tensor/test_swap.py"): (
        "a recorded weight that moves keeps its old halves",
        (
            "            torch.Tensor.data.__set__(self, _parameter(x.halves, self))\n"
            "            self.halves = x.halves\n"
        ),
        "            torch.Tensor.data.__set__(self, _parameter(x.halves, self))\n",
    ),
    ("torch_fp8/tensor/split_weight.py", "tests/torch_fp8/tensor/test_split_weight.py"): (
        "the address of an alias is that of a copy from before a write",
        "known[1]() if known is not None and known[0] == self.halves.version else None",
        "known[1]() if known is not None else None",
    ),
    (
        "torch_fp8/tensor/lazy_quantized.py",
        "tests/torch_fp8/nn/test_input_group.py::test_a_graph_shares_backward_products",
    ): (
        "a graph casts the gradients of gate and up side by side from 16 bits",
        "return with_source(torch.cat([matrix(x) for x in parts], 1), whole)",
        "return torch.cat([matrix(x) for x in parts], 1)",
    ),
    ("torch_fp8/tensor/producer.py", f"{_TESTS}/test_lazy_quantized.py"): (
        "a payload is kept after its producer's input was written",
        (
            "        if self.written_by is not None:\n            self._check_written()\n"
            "        slot = quantizer"
        ),
        "        slot = quantizer",
        "each rank casts its part of an input with a scale of its own",
        "if scale is None and quantizer.group is not None:",
        "if False:",
    ),
    (
        "torch_fp8/tensor/producer.py",
        f"{_TESTS}/test_lazy_quantized.py tests/torch_fp8/nn/test_delayed_producers.py",
    ): (
        "the second reader's slot is not raised",
        "            quantizer.source.record(self.amax())\n            self.raised.append(slot)",
        "            self.raised.append(slot)",
        "the second reader of a norm with delayed scaling records no amax",
        "follows = not (new_row or new_col or quantizer.spec.delayed) and bool(self.raised)",
        "follows = not (new_row or new_col) and bool(self.raised)",
    ),
    ("torch_fp8/tensor/frozen_weight.py", f"{_TESTS}/test_frozen_weight.py"): (
        "a frozen weight's copy keeps the old scale",
        "        payload.scale.copy_(source.scale)\n    return weight",
        "    return weight",
        "an average that is copied into a frozen weight is lost in silence",
        "is_small = wanted.square().sum() < _ROUNDING**2 * values.square().sum()",
        "is_small = wanted.square().sum() < 0",
    ),
    (
        "torch_fp8/tensor/frozen_weight.py",
        f"{_TESTS}/test_frozen_weight.py tests/torch_fp8/conversion/test_share_frozen.py",
    ): (
        "a frozen weight's copy writes the memory that another model shares",
        "        payload.take_own_memory()\n        payload.version",
        "        payload.version",
    ),
    ("torch_fp8/nn/frozen_storage.py", "tests/torch_fp8/conversion/test_freeze.py"): (
        "a frozen weight that is loaded forgets the dtype that it had",
        "old.spec, old.name, old.thawed_dtype)",
        "old.spec, old.name)",
    ),
    ("torch_fp8/tensor/float8_grad.py", f"{_TESTS}/test_float8_grad.py"): (
        "a difference adds",
        "alpha=-alpha",
        "alpha=alpha",
        "unscaling notices the last gradient alone",
        "found_inf.copy_(torch.maximum(found_inf, bad.expand_as(found_inf)))",
        "found_inf.copy_(bad.expand_as(found_inf))",
        "a resumed run rounds otherwise than one whose gradients were set to zero",
        "    grad.rounding.reset()\n",
        "",
        "a clamped gradient is beyond its bound",
        "builtins.max(abs(b) for b in bounds)",
        "builtins.min(abs(b) for b in bounds)",
        "a clamp of an 8-bit gradient exceeds its bound",
        (
            "    grad.store(grad.dequantize().div_(unit).clamp_(*relative))\n"
            "    grad.multiplier.fill_(unit)"
        ),
        "    grad.store(grad.dequantize().clamp_(min, max))",
        "a pickled gradient needs this package",
        '    def __repr__(self) -> str:\n        return f"Float8Grad',
        (
            "    def __reduce_ex__(self, protocol: Any) -> Any:\n"
            "        return Float8Grad, (self.codes, *self.form)\n\n"
            '    def __repr__(self):\n        return f"Float8Grad'
        ),
        "an 8-bit gradient that is copied shares the copy's random bits",
        "return Float8Grad(parts, self.shape, self.dtype, self.rounding.copy())",
        "return Float8Grad(parts, self.shape, self.dtype, self.rounding)",
    ),
    ("torch_fp8/optim/step.py", f"{_TESTS}/test_payload_cache.py"): (
        "the payload of a weight is that of the step before",
        (
            """            if matrix.payload is not None:
                halves.filled = halves.version
"""
        ),
        "            halves.filled = halves.version\n",
        "an optimizer's step raises the amax of the step before",
        "        torch._foreach_copy_(amaxes, [torch.zeros_like(amaxes[0])] * len(amaxes))",
        "        pass",
    ),
    ("torch_fp8/tensor/halves.py", f"{_TESTS}/test_payload_cache.py"): (
        "the payload of a weight is not cast again after other code has written it",
        "return self.filled == self.version and not in_shared_memory(self.high)",
        "return bool(self.filled) and not in_shared_memory(self.high)",
        "a payload moves when it is cast again",
        (
            """            for old, new in zip(self.payload[:2], cast(self)[:2], strict=True):
                old.data.copy_(new)
"""
        ),
        "            self.payload = cast(self)\n",
        "the amax that a weight keeps is not measured again after other code has written it",
        "self.measured == self.version and not in_shared_memory(self.high)",
        "bool(self.measured) and not in_shared_memory(self.high)",
        "a graph reads a payload that other code has made stale",
        "renewed: Any = self.payload if self.is_filled else",
        "renewed: Any = self.payload if self.payload else",
        "a graph reads an amax that other code has made stale",
        "return self.amax if self.is_measured else",
        "return self.amax if self.measured else",
        "the amax of a weight in shared memory is kept",
        "self.measured == self.version and not in_shared_memory(self.high)",
        "self.measured == self.version",
    ),
    ("torch_fp8/tensor/halves.py", "tests/torch_fp8/optim/test_step.py"): (
        "the optimizer goes on raising an amax that the weight no longer keeps",
        "        self.measured = self.stepped = 0\n",
        "        self.measured = 0\n",
    ),
    (
        "torch_fp8/tensor/halves.py",
        f"{_TESTS}/test_payload_cache.py {_TESTS}/test_shared_parts.py",
    ): (
        "the payload of a weight in shared memory is kept",
        "return self.filled == self.version and not in_shared_memory(self.high)",
        "return self.filled == self.version",
    ),
    ("torch_fp8/tensor/quantizer.py", f"{_TESTS}/test_payload_cache.py"): (
        "backward reads a payload that was written since",
        "halves.cast == cast and cast.serves_backward and halves.is_filled",
        "halves.cast == cast and cast.serves_backward",
        "a graph casts a weight for dgrad where it likes",
        "CastOptions.of(spec, scale, after=after, rowwise=flip, columnwise=not flip)",
        "CastOptions.of(spec, scale, rowwise=flip, columnwise=not flip)",
        "backward transposes a weight's bytes with scales of rows",
        "halves.cast == cast and cast.serves_backward and halves.is_filled",
        "halves.cast == cast and halves.is_filled",
    ),
    ("torch_fp8/tensor/dgrad_operands.py", f"{_TESTS}/test_payload_cache.py"): (
        "a graph transposes a payload in forward",
        "    return g, g_t, sums, for_weight.for_dgrad(weight, scale, after)\n",
        "    return g, g_t, sums, for_weight.for_dgrad(weight, scale)\n",
        "a cast beside a transpose leaves the gradient's transpose out",
        "quantizer.options(x, rowwise=True, columnwise=columnwise)",
        "quantizer.options(x, rowwise=True, columnwise=False)",
        "a payload stored as (K, N) is transposed, too",
        "None if for_weight.transposed else for_weight.kept_payload(weight)",
        "for_weight.kept_payload(weight)",
    ),
    ("torch_fp8/nn/grouped_linear_function.py", f"{_TESTS}/test_payload_cache.py"): (
        "a graph casts experts' weights for dgrad where it likes",
        "after = x.scale if dgrad and is_traced() else None",
        "after = None",
    ),
    ("torch_fp8/ops/quantize_beside.py", f"{_TESTS}/test_payload_cache.py"): (
        "a payload that is transposed beside a cast gets the cast's scale",
        "payload._replace(qdata=qdata)",
        "payload._replace(qdata=qdata, scale=layouts[1])",
    ),
    ("torch_fp8/tensor/exchange.py", "tests/torch_fp8/tensor/test_wide_grad.py"): (
        "the gradient of a graph from before the split replaces the sum",
        "parameter.grad = grad if before is None else plain(before) + grad",
        "parameter.grad = grad",
    ),
    ("torch_fp8/tensor/split_shard.py", "tests/torch_fp8/tensor/test_split_weight.py"): (
        "a shard that moves loses the bits that user code wrote",
        "SplitShard(Halves(high, old.residual, old.bits), padded)",
        "SplitShard(Halves(high, old.residual, RESIDUAL_BITS), padded)",
    ),
}
