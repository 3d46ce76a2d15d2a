"""Log-probabilities of TRL's trainers from a converted output layer, in chunks of tokens.

DPO, KTO, GRPO and RLOO call one function of TRL with hidden states and the weight of the output
layer. If they ask for log-probabilities and entropies alone, ours computes them: with the BF16 half
of a weight that is stored in two, the bytes of a frozen one, or FP8 products. SFT also asks for the
accuracy of tokens, which TRL's own function computes.
"""

from typing import Any

from torch import Tensor

from torch_fp8.nn.loss_head import linear_log_probs
from torch_fp8.nn.output_layer import precision_of

_COMPUTED = {"log_probs", "entropy"}


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
        log-probabilities (N,), entropies (N,) or None, and None for TRL's three further results.
    """
    precision = precision_of(weight)
    if precision is None or not _COMPUTED.issuperset(outputs):
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
    return chosen, entropies, None, None, None
