"""Faults in the output layer with its loss."""

_STOCK = "tests/torch_fp8/loss_head/test_linear_cross_entropy.py"
_FP8 = "tests/torch_fp8/loss_head/test_fp8_head.py"
_KERNELS = "tests/torch_fp8/loss_head/test_loss_kernels.py"
FAULTS = {
    ("torch_fp8/nn/loss_head.py", f"{_STOCK}::test_losses_and_gradients_equal_stocks"): (
        "a mean of weighted losses is over their number",
        'divisor = factor.sum() if reduction == "mean"',
        'divisor = valid.float().sum() if reduction == "mean"',
    ),
    (
        "torch_fp8/nn/loss_head.py",
        f"{_STOCK}::test_no_token_and_no_label_give_stocks_losses_and_zero_gradients",
    ): (
        "a mean of no token is 0",
        "    return torch.where(counts, loss, 0 / divisor)",
        "    return loss",
    ),
    (
        "torch_fp8/nn/loss_head.py",
        f"{_STOCK}::test_gradients_are_computed_only_where_they_are_needed",
    ): (
        "gradients are computed although none is asked for",
        "        hidden, weight = hidden.detach(), weight.detach()\n",
        "",
    ),
    ("torch_fp8/nn/loss_function.py", f"{_STOCK}::test_losses_and_gradients_equal_stocks"): (
        "the weight's gradient is not divided by the number of tokens",
        "_scaled(grads[i], power, of_saved[i], in_place=True)",
        "_scaled(grads[i], power / power, of_saved[i], in_place=True)",
    ),
    (
        "torch_fp8/nn/loss_function.py",
        f"{_STOCK}::test_a_checkpoint_computes_gradients_in_its_second_pass_alone",
    ): (
        "the first pass of a checkpoint computes gradients",
        "    if may_drop and saves_nothing():",
        "    if False:",
    ),
    ("torch_fp8/nn/loss_function.py", f"{_STOCK}::test_log_probabilities_and_entropies"): (
        "entropies have no gradient",
        "            terms = terms._replace(spread=grad_entropy.to(torch.float32))",
        "            terms = terms",
    ),
    (
        "torch_fp8/nn/loss_function.py",
        f"{_STOCK}::test_the_gradient_of_the_weight_is_in_float32_once",
    ): (
        "the weight's gradient is scaled in a second float32 tensor",
        "        return grad.mul_(factor).to(dtype)",
        "        return (grad * factor).to(dtype)",
        "a gradient that one product computes is summed in float32",
        "    narrow = weight.dtype == dtype != torch.float32 and wgrad and not options.fp8\n",
        "    narrow = False\n",
    ),
    ("torch_fp8/ops/head_products.py", f"{_STOCK}::test_losses_and_gradients_equal_stocks"): (
        "the last chunk's gradient of the weight replaces those before",
        "            total[part].addmm_(grad[:, part].t().float(), wide)",
        "            total[part].copy_(grad[:, part].t().float() @ wide)",
    ),
    (
        "torch_fp8/ops/head_products.py",
        f"{_FP8}::test_a_factor_of_ten_thousand_overflows_nothing_and_hides_no_token",
    ): (
        "large factors of tokens overflow the payload",
        "        self.scale = scale if self.options.unit else scale * _bound(terms, self.classes)",
        "        self.scale = scale",
    ),
    (
        "torch_fp8/ops/cross_entropy.py",
        f"{_FP8}::test_sums_of_rows_and_the_mean_gradient_are_those_of_float64",
    ): (
        "rounding changes the sum of a row",
        "    return ratio, at_label + (exact - ratio * rounded)",
        "    return torch.ones_like(ratio), at_label",
    ),
    (
        "torch_fp8/ops/linear_cross_entropy.py",
        f"{_FP8}::test_at_most_one_chunk_of_logits_and_a_float32_gradient_are_in_memory",
    ): (
        "all logits are in memory at once",
        "        chunk = options.tokens(len(hidden), len(weight))",
        (
            "        options = options._replace(chunk=len(hidden))\n"
            "        head.options, chunk = options, len(hidden)"
        ),
    ),
    (
        "torch_fp8/kernels/cross_entropy_kernels.py",
        f"{_KERNELS}::test_rows_of_several_blocks_in_a_random_order",
    ): (
        "sums of exponentials are not rescaled when a larger logit comes",
        "            total = total * shrinks + p\n",
        "            total += p\n",
    ),
    (
        "torch_fp8/kernels/cross_entropy_kernels.py",
        f"{_KERNELS}::test_a_logit_costs_six_bytes_of_traffic",
    ): (
        "a gradient is computed again for the second layout",
        "        q = (q.to(tl.uint64) % 256).to(tl.uint8)\n",
        "",
    ),
    ("torch_fp8/kernels/cross_entropy_kernels.py", f"{_KERNELS}::test_one_layout"): (
        "a kernel's payload has the label, too",
        "        grad = tl.where(is_label, 0.0, grad)\n",
        "",
    ),
}
