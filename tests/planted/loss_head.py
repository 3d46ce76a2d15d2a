"""Faults in the output layer with its loss."""

from tests.planted.fault import Fault

_STOCK = "tests/torch_fp8/loss_head/test_linear_cross_entropy.py"
_FP8 = "tests/torch_fp8/loss_head/test_fp8_head.py"
_KERNELS = "tests/torch_fp8/loss_head/test_loss_kernels.py"
FAULTS = [
    Fault(
        "a mean of weighted losses is over their number",
        "torch_fp8/nn/loss_head.py",
        'divisor = factor.sum() if reduction == "mean"',
        'divisor = valid.float().sum() if reduction == "mean"',
        f"{_STOCK}::test_losses_and_gradients_equal_stocks",
    ),
    Fault(
        "a mean of no token is 0",
        "torch_fp8/nn/loss_head.py",
        "    return torch.where(counts, loss, 0 / divisor)",
        "    return loss",
        f"{_STOCK}::test_no_token_and_no_label_give_stocks_losses_and_zero_gradients",
    ),
    Fault(
        "gradients are computed although none is asked for",
        "torch_fp8/nn/loss_head.py",
        "        hidden, weight = hidden.detach(), weight.detach()\n",
        "",
        f"{_STOCK}::test_gradients_are_computed_only_where_they_are_needed",
    ),
    Fault(
        "the weight's gradient is not divided by the number of tokens",
        "torch_fp8/nn/loss_function.py",
        "_scaled(grads[i], power, of_saved[i], in_place=True)",
        "_scaled(grads[i], power / power, of_saved[i], in_place=True)",
        f"{_STOCK}::test_losses_and_gradients_equal_stocks",
    ),
    Fault(
        "the first pass of a checkpoint computes gradients",
        "torch_fp8/nn/loss_function.py",
        "    if may_drop and saves_nothing():",
        "    if False:",
        f"{_STOCK}::test_a_checkpoint_computes_gradients_in_its_second_pass_alone",
    ),
    Fault(
        "entropies have no gradient",
        "torch_fp8/nn/loss_function.py",
        "            terms = terms._replace(spread=grad_entropy.to(torch.float32))",
        "            terms = terms",
        f"{_STOCK}::test_log_probabilities_and_entropies",
    ),
    Fault(
        "the last chunk's gradient of the weight replaces those before",
        "torch_fp8/ops/head_products.py",
        "            total[part].addmm_(grad[:, part].t().float(), wide)",
        "            total[part].copy_(grad[:, part].t().float() @ wide)",
        f"{_STOCK}::test_losses_and_gradients_equal_stocks",
    ),
    Fault(
        "rounding changes the sum of a row",
        "torch_fp8/ops/cross_entropy.py",
        "    return ratio, at_label + (exact - ratio * rounded)",
        "    return torch.ones_like(ratio), at_label",
        f"{_FP8}::test_sums_of_rows_and_the_mean_gradient_are_those_of_float64",
    ),
    Fault(
        "large factors of tokens overflow the payload",
        "torch_fp8/ops/head_products.py",
        "        self.scale = scale if self.options.unit else scale * _bound(terms, self.classes)",
        "        self.scale = scale",
        f"{_FP8}::test_a_factor_of_ten_thousand_overflows_nothing_and_hides_no_token",
    ),
    Fault(
        "all logits are in memory at once",
        "torch_fp8/ops/linear_cross_entropy.py",
        "        chunk = options.tokens(len(hidden), len(weight))",
        "        options = options._replace(chunk=len(hidden))\n"
        "        head.options, chunk = options, len(hidden)",
        f"{_FP8}::test_at_most_one_chunk_of_logits_and_a_float32_gradient_are_in_memory",
    ),
    Fault(
        "sums of exponentials are not rescaled when a larger logit comes",
        "torch_fp8/kernels/cross_entropy_kernels.py",
        "            total = total * shrinks + p\n",
        "            total += p\n",
        f"{_KERNELS}::test_rows_of_several_blocks_in_a_random_order",
    ),
    Fault(
        "a kernel's payload has the label, too",
        "torch_fp8/kernels/cross_entropy_kernels.py",
        "        grad = tl.where(is_label, 0.0, grad)\n",
        "",
        f"{_KERNELS}::test_one_layout",
    ),
    Fault(
        "the weight's gradient is scaled in a second float32 tensor",
        "torch_fp8/nn/loss_function.py",
        "    if in_place and (grad.is_cpu or grad.dtype == dtype):",
        "    if in_place and grad.dtype == dtype:",
        f"{_STOCK}::test_the_gradient_of_the_weight_is_in_float32_once",
    ),
]
