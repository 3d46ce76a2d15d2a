"""Muon as third parties have it, for matrices and for batches of them."""

import torch


class SingleDeviceMuon(torch.optim.Optimizer):
    """It orthogonalizes the last two dimensions, makes missing gradients, and scales in place."""

    def __init__(self, params, lr=0.02, weight_decay=0.0, momentum=0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                state = self.state[p]
                if len(state) == 0:
                    state["momentum_buffer"] = torch.zeros_like(p)
                buffer = state["momentum_buffer"]
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp_(buffer, group["momentum"]))
                update *= max(1, p.size(-2) / p.size(-1)) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update.to(p.dtype), alpha=-group["lr"])


def orthogonal(grad):
    """Five steps of Newton-Schulz in BF16, on (..., N, K)."""
    tall = grad.size(-2) > grad.size(-1)
    y = grad.bfloat16()
    y = y.mT if tall else y
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = y @ y.mT
        y = 3.4445 * y + (-4.775 * gram + 2.0315 * gram @ gram) @ y
    return y.mT if tall else y
