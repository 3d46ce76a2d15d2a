"""Log-probabilities of TRL's trainers from a converted output layer, in chunks of tokens.

SFT, DPO, KTO, GRPO and RLOO call one function of TRL with hidden states and the weight of the
output layer. Ours computes log-probabilities, entropies and mean logits: with the BF16 half of a
weight that is stored in two, the bytes of a frozen one, or FP8 products. So it serves GRPO, RLOO,
KTO and all reference models. The policies of SFT and DPO also ask whether a label is the likeliest
token, which TRL's own function computes.
"""

from typing import Any

import torch
from torch import Tensor

from torch_fp8.nn.loss_head import linear_log_probs
from torch_fp8.nn.output_layer import precision_of
from torch_fp8.tensor.split_weight import stored

_COMPUTED = {"log_probs", "entropy", "mean_logits"}


def log_probs(
    original: Any,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = ("all",),
) -> Any:
    """Replace ``ChunkedLogProbFunction.apply`` of TRL for the weight of a converted layer.

    Returns:
        log-probabilities, entropies or None, None, mean logits or None, and None; each (N,).
    """
    precision = precision_of(weight)
    averaged = "mean_logits" in outputs
    theirs = not _COMPUTED.issuperset(outputs) or (averaged and final_logit_softcapping is not None)
    if precision is None or theirs:
        forms = final_logit_softcapping, logit_scale, outputs
        return original(hidden, weight, bias, targets, temperature, chunk_size, *forms)
    entropy = "entropy" in outputs
    results = linear_log_probs(
        hidden,
        weight,
        targets,
        bias,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=final_logit_softcapping,
        entropy=entropy,
        precision=precision,
    )
    chosen, entropies = results if entropy else (results, None)
    mean = None
    if averaged:  # without a softcap, the mean of logits is a product with the mean row
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            mean = hidden.float() @ stored(weight).mean(0, dtype=torch.float32)  # (N,)
            mean = mean if bias is None else mean + bias.float().mean()
            mean = mean * (logit_scale / temperature)
    return chosen, entropies, None, mean, None
