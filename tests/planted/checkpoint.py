"""Faults in checkpoints that are read, exported and sent to engines."""

from tests.planted.fault import Fault

_TESTS = "tests/torch_fp8/checkpoint"
FAULTS = [
    Fault(
        "an export calls every output layer FP8",
        "torch_fp8/checkpoint/export.py",
        "'FP8' if self.head in self.fp8 else 'BF16'",
        "'FP8' if self.head else 'BF16'",
        "tests/torch_fp8/checkpoint/test_export.py::"
        "test_an_output_layer_in_fp8_is_refused_tied_and_written_in_bf16_else",
    ),
    Fault(
        "of several active adapters the last alone is folded in",
        "torch_fp8/checkpoint/fold_adapters.py",
        "            folded = folded + delta.float()",
        "            folded = dequantized(weight).detach().float() + delta.float()",
        f"{_TESTS}/test_fold_adapters.py",
    ),
    Fault(
        "an exponent scale is read as a number",
        "torch_fp8/checkpoint/safetensors_files.py",
        "    if scale.dtype == torch.uint8:\n        scale = scale.view(torch.float8_e8m0fnu)\n",
        "",
        f"{_TESTS}/test_checkpoint_format.py {_TESTS}/test_load_checkpoint.py",
    ),
    Fault(
        "a scale of zero in a file is accepted",
        "torch_fp8/checkpoint/safetensors_files.py",
        "        if not bool((value > 0).all()):",
        "        if not bool((value >= 0).all()):",
        f"{_TESTS}/test_checkpoint_format.py {_TESTS}/test_load_checkpoint.py",
    ),
    Fault(
        "blocks of a single scale are those of the whole weight",
        "torch_fp8/checkpoint/formats.py",
        "if grid == expected or (expected == (1, 1) and math.prod(grid) == 1):",
        "if grid == expected or math.prod(grid) == 1:",
        f"{_TESTS}/test_checkpoint_format.py {_TESTS}/test_load_checkpoint.py",
    ),
    Fault(
        "a shard may be one tensor too large",
        "torch_fp8/checkpoint/safetensors_files.py",
        "        if shard and size + group.num_bytes > most:",
        "        if shard and size > most:",
        f"{_TESTS}/test_export.py",
    ),
    Fault(
        "an engine gets the weights without Smooth-SwiGLU's factors",
        "torch_fp8/checkpoint/export_plan.py",
        "smooth = None if name is None or adapted_layers(model) else SmoothFold(model)",
        "smooth = SmoothFold(model) if is_file and not adapted_layers(model) else None",
        f"{_TESTS}/test_fold_smooth.py {_TESTS}/test_weight_sync.py",
    ),
    Fault(
        "queries and keys of a fused projection are cut at equal sizes",
        "torch_fp8/checkpoint/export_layers.py",
        "return [heads * size, of_keys * size, rows - (heads + of_keys) * size]",
        "return [heads * size, heads * size, rows - 2 * heads * size]",
        f"{_TESTS}/test_export.py",
    ),
    Fault(
        "step counts of a folder go to the optimizers in reverse",
        "torch_fp8/optim/split_optimizer.py",
        "zip(split, counts, strict=False)",
        "zip(split, reversed(counts), strict=False)",
        f"{_TESTS}/test_adopt_steps.py",
    ),
    Fault(
        "weights in blocks are written as if engines had one scale for each row",
        "torch_fp8/checkpoint/formats.py",
        '        {"strategy": "block", "block_structure": [*FROZEN_BLOCK]},\n',
        '        {"strategy": "channel"},\n',
        f"{_TESTS}/test_export.py",
    ),
    Fault(
        "weights that share memory are sent to an engine under each name",
        "torch_fp8/checkpoint/export_plan.py",
        "            if before != key and (key in tied or not is_file):",
        "            if before != key and key in tied and is_file:",
        f"{_TESTS}/test_weight_sync.py",
    ),
    Fault(
        "a file that is not whole raises the error of its library",
        "torch_fp8/checkpoint/safetensors_files.py",
        "except safetensors.SafetensorError as error",
        "except KeyError as error",
        "tests/torch_fp8/checkpoint/test_checkpoint_format.py",
    ),
    Fault(
        "layers that are sharded already get residuals",
        "torch_fp8/checkpoint/adopt_checkpoint.py",
        "    sharded = sharded or any(isinstance(p, DTensor) for p in model.parameters())\n",
        "",
        "tests/torch_fp8/checkpoint/test_host_layers.py",
    ),
]
