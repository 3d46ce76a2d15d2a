"""Small models that random programs train, each with its batches and its loss."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.models import llama
from tests.moe_models import moe_model

SIZE, HIDDEN, VOCABULARY = 64, 96, 64


class Checkpointed(nn.Module):
    """Blocks in a row, each recomputed in backward if asked for."""

    recompute: str | None = None

    def through(self, blocks: Any, x: Tensor) -> Tensor:
        """The result of `blocks` on `x`."""
        for block in blocks:
            if self.recompute is None or not self.training:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return x


class Residual(nn.Module):
    """A norm and what follows it, beside the identity."""

    def __init__(self, norm: nn.Module, branch: nn.Module) -> None:
        super().__init__()
        self.norm, self.branch = norm, branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(self.norm(x))


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(SIZE, HIDDEN, bias=False)
        self.up_proj = nn.Linear(SIZE, HIDDEN, bias=False)
        self.down_proj, self.act_fn = nn.Linear(HIDDEN, SIZE, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Adapted(nn.Module):
    """A frozen layer with a trained product of two small ones beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(SIZE, SIZE).requires_grad_(False)
        self.lora_A = nn.Linear(SIZE, 8, bias=False)
        self.lora_B = nn.Linear(8, SIZE, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x))


class Vectors(Checkpointed):
    """Blocks between a first and a last layer; the target is a fixed function of the input."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(SIZE, SIZE), nn.ModuleList(blocks)
        self.last = nn.Linear(SIZE, 48)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.through(self.blocks, self.first(x)))


class Images(Checkpointed):
    """A convolution in front of linear layers, with a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(256, SIZE), nn.GELU())])
        self.last = nn.Linear(SIZE, 48)

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.norm(self.conv(x.view(len(x), 4, 4, 4))).relu().flatten(1)
        return self.last(self.through(self.blocks, pixels))


class Tokens(Checkpointed):
    """An embedding, blocks, and an output layer that may be the embedding."""

    def __init__(self, blocks: list[nn.Module], tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY + 1, SIZE)
        self.blocks, self.norm = nn.ModuleList(blocks), nn.RMSNorm(SIZE, eps=1e-6)
        self.lm_head = nn.Linear(SIZE, VOCABULARY + 1, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.norm(self.through(self.blocks, self.embed(tokens))))


def _gated() -> nn.Module:
    return Residual(nn.RMSNorm(SIZE, eps=1e-6), GatedMLP())


def _dense() -> nn.Module:
    mlp = nn.Sequential(nn.Linear(SIZE, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, SIZE))
    return Residual(nn.LayerNorm(SIZE), mlp)


def _conv1d() -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    mlp = nn.Sequential(Conv1D(HIDDEN, SIZE), nn.GELU(), Conv1D(SIZE, HIDDEN))
    return Residual(nn.LayerNorm(SIZE), mlp)


def _frozen() -> nn.Module:
    model = Vectors([_dense(), _gated(), _dense()])
    model.first.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    return model


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=SIZE,
            n_layer=2,
            n_head=4,
            vocab_size=VOCABULARY,
            n_positions=32,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
        )
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: Vectors([_dense(), _dense()]),
    "gated": lambda: Vectors([_gated(), _gated()]),
    "Conv1D": lambda: Vectors([_conv1d(), _conv1d()]),
    "frozen": _frozen,
    "adapters": lambda: Vectors([Residual(nn.LayerNorm(SIZE), Adapted()), _dense()]),
    "images": Images,
    "tokens": lambda: Tokens([_gated(), _dense()], tied=False),
    "tied": lambda: Tokens([_gated(), _gated()], tied=True),
    "llama": llama,
    "gpt2": _gpt2,
    "mixtral": lambda: moe_model("Mixtral"),
    "gpt-oss": lambda: moe_model("GptOss"),
}
OF_HOST = ("llama", "gpt2", "mixtral", "gpt-oss")


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model."""
    for path in ("blocks", "model.layers", "transformer.h"):
        owner: Any = model
        for name in path.split("."):
            owner = getattr(owner, name, None)
        if owner is not None:
            return list(owner)
    raise AssertionError(type(model))


def recompute_blocks(model: nn.Module, mode: str) -> None:
    """Let `model` recompute its blocks in backward: ``reentrant`` or ``plain``."""
    if isinstance(model, Checkpointed):
        model.recompute = mode
    else:
        options = {"use_reentrant": mode == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def loss_of(model: nn.Module, rows: int, seed: int, state: Any = None) -> Tensor:
    """The loss on the batch of a seed, which has a number of rows, with the weights of `state`."""

    def call(*args: Any, **options: Any) -> Any:
        if state is None:
            return model(*args, **options)
        return torch.func.functional_call(model, state, args, options)

    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, Vectors | Images):
        x = torch.randn(rows, SIZE, generator=generator)
        target = torch.linspace(-1, 1, 48) * x[:, :48].roll(1, 1)
        return F.mse_loss(call(x).float(), target, reduction="sum") / max(target.numel(), 1)
    length = 7 if rows % 2 else 8
    start = torch.randint(VOCABULARY, (max(rows // 4, 1), 1), generator=generator)
    tokens = (start + 3 * torch.arange(length)) % VOCABULARY
    if isinstance(model, Tokens):
        logits = call(tokens[:, :-1])
    else:
        logits = call(input_ids=tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
