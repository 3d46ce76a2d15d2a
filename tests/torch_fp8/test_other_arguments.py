import copy

import pytest
import torch
import transformers
from torch import nn

from tests.internals import Float8GatedMLP, Float8RMSNorm, SharedOutput
from torch_fp8 import FP8Config, convert_to_float8

ANY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
ATTENTION = {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
TWO = {"num_hidden_layers": 2}
MODELS = {
    "Mamba2": {
        **TWO,
        **{"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    },
    "GraniteMoeHybrid": {
        **{**TWO, **ATTENTION, **MAMBA, "shared_intermediate_size": 96, "num_local_experts": 0},
        "layer_types": ["mamba", "attention"],
    },
    "Zamba2": {
        **{**TWO, "intermediate_size": 96, "num_attention_heads": 4, "n_mamba_heads": 8},
        **{"mamba_d_state": 16, "mamba_headdim": 16, "mamba_ngroups": 1, "chunk_size": 16},
        **{"layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1},
    },
    "NemotronH": {
        **{**ATTENTION, "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16},
        **{"ssm_state_size": 16, "n_groups": 1, "chunk_size": 16},
        "layers_block_type": ["mamba", "attention"],
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_models_with_gated_norms_train(name):
    config = getattr(transformers, f"{name}Config")(**ANY, **MODELS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    gated = [m for m in model.modules() if "Gated" in type(m).__name__]
    tokens = torch.randint(2, 128, (2, 24))
    losses = []
    for convert in (False, True):
        if convert:
            report = convert_to_float8(model)
            assert report.producers
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.item())
    assert gated
    assert not any(isinstance(m, Float8RMSNorm) for m in gated)
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


class Norm(nn.Module):
    """As Llama's, whose input has another name."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = 1e-6

    def forward(self, values):
        y = values.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * y).to(values.dtype)


class GatedNorm(Norm):
    def forward(self, values, gate=None):
        return super().forward(values if gate is None else values * nn.functional.silu(gate))


class ScaledLayerNorm(nn.LayerNorm):
    def forward(self, values, scale=1):
        return super().forward(values) * scale


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(64, 96), nn.Linear(64, 96)
        self.down = nn.Linear(96, 64)

    def forward(self, values, scale=None):
        product = nn.functional.silu(self.gate(values)) * self.up(values)
        return self.down(product) if scale is None else self.down(product) * scale


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.mlp = norm, MLP()
        self.q, self.k = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, norm, mlp):
        args, kwargs = norm
        h = self.norm(x, *args, **kwargs) if args is not None else self.norm(values=x, **kwargs)
        h = self.q(h) + self.k(h)
        args, kwargs = mlp
        return self.mlp(h, *args, **kwargs) if args is not None else self.mlp(values=h, **kwargs)


ALONE, BY_KEYWORD, HALF = ((), {}), (None, {}), torch.full((), 0.5)
CALLS = {
    "the input alone": (Norm, ALONE, ALONE),
    "by keyword": (Norm, BY_KEYWORD, BY_KEYWORD),
    "a gate": (GatedNorm, ((HALF,), {}), ALONE),
    "a gate by keyword": (GatedNorm, ((), {"gate": HALF}), ((), {"scale": HALF})),
    "an optional one left out": (GatedNorm, ALONE, ((HALF,), {})),
    "a scale of a LayerNorm": (ScaledLayerNorm, ((HALF,), {}), ((None,), {})),
    "a LayerNorm by keyword": (ScaledLayerNorm, (None, {"scale": HALF}), (None, {"scale": HALF})),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_other_arguments_reach_the_module(recipe, call):
    cls, norm, mlp = CALLS[call]
    torch.manual_seed(0)
    stock = Block(cls(64))
    block = copy.deepcopy(stock)
    convert_to_float8(block, FP8Config(recipe=recipe))
    assert isinstance(block.norm, (Float8RMSNorm, SharedOutput)) == (cls is not GatedNorm)
    assert isinstance(block.mlp, Float8GatedMLP)
    results = []
    for model in (stock, block):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x, norm, mlp)
        output.float().sum().backward()
        results.append((output.float(), x.grad))
    for want, got in zip(*results, strict=True):
        assert (got - want).norm() < 0.1 * want.norm()
