"""FP8-LM's all-reduce of gradients under DistributedDataParallel, ``communication="fp8-lm"``.

The published alternative to `torch_fp8.distributed.ddp.comm_hook`, so that the two can be compared
(arXiv 2310.18313, section 2.1): one scale for a whole tensor, and a sum in FP8. Of a bucket, with N
ranks:

1. Of each matrix every rank finds ``448 / amax``, what would bring its largest gradient to E4M3's
   maximum, and an all-reduce takes the MIN over ranks: one scale, shared by all. A rank whose
   gradient is not finite sends 0, and the average of that matrix is NaN everywhere.
2. The matrices are cast to E4M3 with that scale, times mu, which leaves room for the sum: the
   largest gradient becomes ``448 * mu``. (Applied before the scale is found mu would cancel.)
3. An all-to-all brings each rank its part of everybody's codes. Their sum is rounded to E4M3 after
   every addition and saturates, as in a ring of an 8-bit all-reduce, which neither gloo nor NCCL is
   asked for. An all-gather gives the sum's codes to all; they need no second scale.
4. The mean is ``sum * scale / N``.

mu follows from how many of the sums saturate. Where more than 1e-5 of a step's sums sit at E4M3's
maximum, mu is halved; else it grows by ``2 ** (1 / 1000)``, and so doubles in 1,000 steps. It stays
within ``1 / N``, where no sum over N ranks can saturate, and 1, and starts in the middle. All ranks
count the same sums and so have the same mu, on the device, without waiting for it.

Vectors and small matrices travel as BF16 and are summed in float32, as in `comm_hook`. The
cast and the sum are torch's own operators on every device: this is not made to be fast.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_fp8.distributed.collectives import all_gather, all_to_all
from torch_fp8.distributed.ddp.comm_hook import Future, QuantizedAllReduce, Stages
from torch_fp8.distributed.ddp.fp8_grad_reducer import Float8GradReducer
from torch_fp8.ops import messages
from torch_fp8.quantization.block_scaled import MIN_NUMEL
from torch_fp8.quantization.formats import E4M3, MIN_SCALE

MAX_SATURATED = 1e-5
"""The share of a step's sums at E4M3's maximum above which mu is halved."""

_GROWTH = 2 ** (1 / 1000)
_ATTRIBUTE = "_fp8_automatic_scaling"
_KEY = "automatic_scaling.mu"


class AutomaticScaling:
    """FP8-LM's automatic scaling: mu, the part of E4M3's range that one rank's gradients may use.

    Attributes:
        mu: () float32, on the device of the gradients once there were any; None before.
    """

    def __init__(self, mu: Tensor | None = None) -> None:
        self.mu = mu

    def prepare(self, world_size: int, device: torch.device) -> Tensor:
        """Return mu for the step that begins."""
        if self.mu is None:
            self.mu = torch.tensor(world_size**-0.5, device=device)
        self.mu = self.mu.to(device).clamp(1 / world_size, 1)
        return self.mu

    def update(self, saturated: Tensor, numel: int, world_size: int) -> None:
        """Update mu for the next step.

        Args:
            saturated: () number of sums at the maximum.
            numel: number of sums.
        """
        assert self.mu is not None
        too_many = saturated > MAX_SATURATED * numel
        self.mu = torch.where(too_many, self.mu / 2, self.mu * _GROWTH).clamp(1 / world_size, 1)


def automatic_scaling(module: nn.Module) -> AutomaticScaling | None:
    """Return the automatic scaling of a module that DistributedDataParallel wraps; None without
    one.
    """
    scaling: AutomaticScaling | None = module.__dict__.get(_ATTRIBUTE)
    return scaling


def set_automatic_scaling(module: nn.Module, scaling: AutomaticScaling | None) -> None:
    """Give a module its automatic scaling, or take it away."""
    if scaling is None:
        module.__dict__.pop(_ATTRIBUTE, None)
    else:
        module.__dict__[_ATTRIBUTE] = scaling


def automatic_scaling_state(module: nn.Module) -> dict[str, Tensor]:
    """Return mu as a state dict of one key, on the CPU; empty where there is none yet."""
    scaling = automatic_scaling(module)
    return {} if scaling is None or scaling.mu is None else {_KEY: scaling.mu.cpu().clone()}


def take_automatic_scaling_state(module: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Restore what `automatic_scaling_state` returned, and return the rest of `state`."""
    if _KEY in state:
        scaling = automatic_scaling(module)
        if scaling is None:  # not wrapped yet
            set_automatic_scaling(module, AutomaticScaling(state[_KEY].clone()))
        else:
            scaling.mu = state[_KEY].clone()
    return {key: value for key, value in state.items() if key != _KEY}


class SharedScaleAllReduce(QuantizedAllReduce):
    """The state of the hook `comm_hook.average_bucket`, with FP8-LM's rule.

    Args:
        group: DDP's process group, of more than one rank.
        scaling: holds mu.
        beside: see `QuantizedAllReduce`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        scaling: AutomaticScaling,
        beside: Float8GradReducer | None = None,
    ) -> None:
        super().__init__(group, beside)
        self.scaling = scaling
        self._saturated: list[Tensor] = []
        self._numel = 0

    def average(self, bucket: dist.GradBucket) -> Future:
        """Begin to average a bucket, in three collectives, and update mu with the last one."""
        if bucket.index() == 0:  # what is left belongs to a backward that raised
            self._saturated.clear()
            self._numel = 0
        return super().average(bucket)

    def _release(self, device: torch.device, to_the_end: bool) -> None:
        super()._release(device, to_the_end)
        if self._is_last and self._saturated:
            with self._stream.beside(device):
                saturated = torch.stack(self._saturated).sum()
                self.scaling.update(saturated, self._numel, self.world_size)

    def _average(self, bucket: dist.GradBucket, buffer: Tensor, future: Future) -> Stages:
        ranks, group = self.world_size, self.group
        matrices = [g for g in bucket.gradients() if g.ndim >= 2 and g.numel() >= MIN_NUMEL]
        others = [g for g in bucket.gradients() if not (g.ndim >= 2 and g.numel() >= MIN_NUMEL)]
        factors = buffer.new_zeros(len(matrices), dtype=torch.float32)
        for i, matrix in enumerate(matrices):
            # NaN: of a matrix with an Inf or NaN, of which the minimum might not tell.
            factors[i] = (E4M3.max / matrix.abs().amax().float()).nan_to_num(0.0, posinf=torch.inf)
        factors.clamp_(max=1 / MIN_SCALE)
        work = dist.all_reduce(factors, dist.ReduceOp.MIN, group=group, async_op=True)
        yield

        work.wait()
        mu = self.scaling.prepare(ranks, buffer.device)
        codes = [_to_e4m3(m.flatten().float() * (mu * factors[i])) for i, m in enumerate(matrices)]
        parts = _shared_out(codes, ranks, buffer, torch.uint8)
        plain = [g.flatten() for g in others]
        layout = messages.Layout(0, -(-sum(p.numel() for p in plain) // ranks))
        flat = torch.cat(plain) if plain else buffer.new_empty(0)
        message = messages.pack_flat(buffer.new_empty(0, dtype=torch.float32), flat, layout, ranks)
        sent = torch.cat([parts, message], 1)
        received = torch.empty_like(sent)
        work = all_to_all(received, sent, group, async_op=True)
        yield

        work.wait()
        width = parts.shape[1]
        total = _sum_in_e4m3(received[:, :width].contiguous())
        combined = messages.reduce_and_repack(received[:, width:].contiguous(), layout, 1 / ranks)
        sent = torch.cat([total, combined[0]])
        work = all_gather(received, sent, group, async_op=True)
        yield

        work.wait()
        sums = received[:, :width].contiguous().view(-1).view(E4M3.dtype).float()
        position = 0
        for i, matrix in enumerate(matrices):
            own = sums[position : position + matrix.numel()]
            self._saturated.append((own.abs() == E4M3.max).sum())
            self._numel += own.numel()
            scale = torch.where(factors[i] > 0, 1 / (mu * factors[i]), torch.nan)
            matrix.copy_((own * (scale / ranks)).view(matrix.shape))
            position += matrix.numel()
        averages = messages.unpack(received[:, width:].contiguous(), layout, torch.float32)[1].view(
            -1
        )
        position = 0
        for gradient in others:
            gradient.copy_(averages[position : position + gradient.numel()].view(gradient.shape))
            position += gradient.numel()
        future.set_result(buffer)


def _to_e4m3(x: Tensor) -> Tensor:
    """Round float32 values to the nearest E4M3 bytes; those beyond the range saturate."""
    return x.clamp(-E4M3.max, E4M3.max).to(E4M3.dtype).view(torch.uint8)


def _sum_in_e4m3(codes: Tensor) -> Tensor:
    """Sum the rows of (N, C) in their order, in E4M3 after each addition, to (C,) uint8."""
    rows = codes.view(E4M3.dtype)
    total = rows[0]
    for row in rows[1:]:
        total = _to_e4m3(total.float() + row.float()).view(E4M3.dtype)
    return total.view(torch.uint8)


def _shared_out(pieces: list[Tensor], ranks: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Write the pieces into (N, C), one after another, followed by zeros."""
    numel = sum(piece.numel() for piece in pieces)
    width = -(-numel // ranks)
    shared = like.new_zeros(ranks * width, dtype=dtype)
    if pieces:
        torch.cat(pieces, out=shared[:numel])
    return shared.view(ranks, width)
