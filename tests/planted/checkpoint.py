"""Faults in checkpoints that are read, exported and sent to engines."""

_TESTS = "tests/torch_fp8/checkpoint"
FAULTS = {
    ("torch_fp8/checkpoint/load.py", f"{_TESTS}/test_load_checkpoint.py"): (
        "norms of a loaded model are connected to layers that are not frozen yet",
        "    convert(model, config, target, fill)\n",
        "    convert(model, config, target)\n    fill(model, config, target)\n",
    ),
    (
        "torch_fp8/checkpoint/export.py",
        (
            f"{_TESTS}/test_export.py::"
            "test_an_output_layer_in_fp8_is_refused_tied_and_written_in_bf16_else"
        ),
    ): (
        "an export calls every output layer FP8",
        "'FP8' if self.head in self.fp8 else 'BF16'",
        "'FP8' if self.head else 'BF16'",
    ),
    ("torch_fp8/checkpoint/export.py", f"{_TESTS}/test_export.py"): (
        "a report counts the bytes of the model",
        "sum(tensor.nbytes for item in in_fp8 for tensor in plan[item.key].values())",
        "sum(item.tensor.nbytes for item in in_fp8)",
    ),
    (
        "torch_fp8/checkpoint/exported_tensors.py",
        f"{_TESTS}/test_export.py::test_a_frozen_output_layer_in_fp8_is_written_in_bf16",
    ): (
        "a frozen output layer's recipe has to be that of the other layers",
        "if m not in heads} or layers",
        "if True} or layers",
    ),
    (
        "torch_fp8/checkpoint/export_layers.py",
        f"{_TESTS}/test_export.py::test_a_frozen_output_layer_in_fp8_is_written_in_bf16",
    ): (
        "a frozen output layer that is tied cannot be exported",
        "any(not (isinstance(m, OutputLayer) and m.loss_head.was_frozen) for m in pair)",
        "pair",
    ),
    ("torch_fp8/checkpoint/adapters.py", f"{_TESTS}/test_fold_adapters.py"): (
        "of several active adapters the last alone is folded in",
        "            folded = folded + delta.float()",
        "            folded = dequantized(weight).detach().float() + delta.float()",
    ),
    (
        "torch_fp8/checkpoint/load.py",
        f"{_TESTS}/test_checkpoint_format.py {_TESTS}/test_load_checkpoint.py",
    ): (
        "a scale of zero in a file is accepted",
        "        if not bool((value > 0).all()):",
        "        if not bool((value >= 0).all()):",
    ),
    ("torch_fp8/checkpoint/files.py", f"{_TESTS}/test_export.py"): (
        "a shard may be one tensor too large",
        "        if shards[-1] and size + tensor.nbytes > max_shard_size:",
        "        if shards[-1] and size > max_shard_size:",
        "tensors of a file share the memory of the model",
        "    return copy.copy_(value.detach())\n",
        "    return value.detach().cpu().contiguous()\n",
        "an index names the last file for all tensors",
        "name for name, keys in zip(names, shards, strict=True) for key in keys}",
        "names[-1] for keys in shards for key in keys}",
    ),
    ("torch_fp8/checkpoint/files.py", f"{_TESTS}/test_checkpoint_format.py"): (
        "a file that is not whole raises the error of its library",
        "except safetensors.SafetensorError as error",
        "except KeyError as error",
    ),
    (
        "torch_fp8/checkpoint/formats.py",
        f"{_TESTS}/test_checkpoint_format.py {_TESTS}/test_load_checkpoint.py",
    ): (
        "an exponent scale is read as a number",
        "    if scale.dtype == torch.uint8:\n        scale = scale.view(torch.float8_e8m0fnu)\n",
        "",
        "blocks of a single scale are those of the whole weight",
        "by_grid.get((1, 1) if math.prod(grid) == 1 else grid)",
        "by_grid.get(grid, blocks[0] if math.prod(grid) == 1 else None)",
    ),
    ("torch_fp8/checkpoint/formats.py", f"{_TESTS}/test_formats.py"): (
        "weights in blocks are written as if engines had one scale for each row",
        '    return {"strategy": "block", "block_structure": [rows, cols]}\n',
        '    return {"strategy": of_rows}\n',
        "activations of weights in blocks are described as blocks",
        '_strategy_of_block(min(rows, 1), cols, "token")',
        '_strategy_of_block(rows, cols, "token")',
        "exponents of fine-grained scales are not described",
        ' | ({"scale_fmt": "ue8m0"} if format.exponents else {})',
        "",
        "exponents of compressed-tensors are written and not read",
        'exponents, title = form == "mxfp8-quantized", f"',
        'exponents, title = False, f"',
        "an export writes with other blocks than those of its recipe",
        "block, exponents = GRANULARITIES[granularity].block,",
        "block, exponents = (0, 0),",
    ),
    ("torch_fp8/checkpoint/exported_tensors.py", f"{_TESTS}/test_formats.py"): (
        "experts in blocks keep their scales of rows",
        "            recast = form.block == FROZEN_BLOCK\n",
        "            recast = False\n",
    ),
    (
        "torch_fp8/checkpoint/exported_tensors.py",
        f"{_TESTS}/test_fold_smooth.py {_TESTS}/test_weight_sync.py",
    ): (
        "an engine gets the weights without Smooth-SwiGLU's factors",
        "smooth = SmoothFold(None if name is None or fold.wrappers else model)",
        "smooth = SmoothFold(model if is_file and not fold.wrappers else None)",
    ),
    ("torch_fp8/checkpoint/exported_tensors.py", f"{_TESTS}/test_weight_sync.py"): (
        "weights that share memory are sent to an engine under each name",
        "            if before != key and (key in tied or not is_file):",
        "            if before != key and key in tied and is_file:",
    ),
    ("torch_fp8/checkpoint/export_layers.py", f"{_TESTS}/test_export.py"): (
        "queries and keys of a fused projection are cut at equal sizes",
        "return [heads * size, of_keys * size, rows - (heads + of_keys) * size]",
        "return [heads * size, heads * size, rows - 2 * heads * size]",
    ),
    ("torch_fp8/optim/split_optimizer.py", f"{_TESTS}/test_adopt_steps.py"): (
        "step counts of a folder go to the optimizers in reverse",
        "zip(split, counts.values(), strict=False)",
        "zip(split, reversed(counts.values()), strict=False)",
    ),
    ("torch_fp8/checkpoint/adopt.py", f"{_TESTS}/test_host_layers.py"): (
        "layers that are sharded already get residuals",
        "    sharded = sharded or any(isinstance(p, DTensor) for p in model.parameters())\n",
        "",
    ),
}
