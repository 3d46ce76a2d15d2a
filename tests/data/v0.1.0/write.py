"""Write the files of this folder with the release 0.1.0 (commit 1eeb94f9); tests load them.

    git worktree add ../v0.1.0 1eeb94f9
    PYTHONPATH=../v0.1.0 python tests/data/v0.1.0/write.py

Files of torch.save have ``saved``, and ``values``: the first rows, in float32, of the tensors that
the loaded objects stand for.
"""

import io
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from torch_fp8 import (
    FP8Config,
    convert_optimizer,
    convert_to_float8,
    export,
    merged_state_dict,
)

FOLDER = Path(__file__).parent
STATES = {
    "o2": {},
    "o3_fp8": {"opt_level": "O3", "checkpoint_states": "fp8"},
    "moments_4": {"moment_bits": 4},
    "moments_4_fp8": {"moment_bits": 4, "checkpoint_states": "fp8"},
    "residuals_4": {"residual_bits": 4, "checkpoint_states": "fp8"},
    "residuals_0": {"residual_bits": 0, "checkpoint_states": "fp8"},
    "bf16_residuals_4": {"residual_bits": 4, "checkpoint_states": "fp8"},
    "bf16_residuals_0": {"residual_bits": 0, "checkpoint_states": "fp8"},
}
"""File -> options; the weights are BF16 if its name begins so."""
CONFIGS = {
    "plain": {"recipe": "rowwise", "opt_level": "O3", "seed": 7},
    "attention": {"recipe": "rowwise", "save_attention": "qkv"},
    "moments": {"recipe": "rowwise", "moment_bits": 4},
    "residuals": {"recipe": "rowwise", "residual_bits": 4},
}


def trained(dtype=torch.float32, **options):
    """Return a converted model and AdamW after three steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)).to(dtype)
    config = FP8Config(recipe="tensorwise", **options)
    convert_to_float8(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    convert_optimizer(optimizer, config, model=model)
    for step in range(3):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        with torch.autocast("cpu", torch.bfloat16):
            model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def values(model, optimizer):
    """Return the first rows of weights and moments, by name."""
    found = {f"weight {n}": v for n, v in merged_state_dict(model, optimizer).items()}
    for name, parameter in model.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            found[f"{moment} {name}"] = optimizer.state[parameter][moment]
    return {name: first_rows(value) for name, value in found.items()}


def first_rows(value):
    """Return the first rows of a tensor as a plain float32 tensor."""
    rows = value.detach().float()[:8]
    return torch.empty(rows.shape).copy_(rows)


def save(name, saved, expected):
    """Write a file of torch.save."""
    torch.save({"saved": saved, "values": expected}, FOLDER / f"{name}.pt")


def main():
    for name, options in STATES.items():
        dtype = torch.bfloat16 if name.startswith("bf16") else torch.float32
        model, optimizer = trained(dtype, **options)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        save(name, state, values(model, optimizer))
    for name in ("dcp", "dcp_moments_4"):
        model, optimizer = trained(**STATES["moments_4_fp8"] if name == "dcp_moments_4" else {})
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(state, checkpoint_id=FOLDER / name)
        save(f"{name}_values", None, values(model, optimizer))
    for name, options in (("model", {}), ("model_residuals_4", {"residual_bits": 4})):
        model, optimizer = trained(**options)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        weights = {n: v for n, v in values(model, optimizer).items() if n.startswith("weight")}
        save(name, buffer.getvalue(), weights)
    save("configs", {n: FP8Config(**options) for n, options in CONFIGS.items()}, CONFIGS)
    exported()


def exported():
    """Write a checkpoint for inference engines, and the weights of its FP8 layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    convert_to_float8(model, FP8Config(recipe="rowwise"))
    export(model, FOLDER / "exported", "compressed-tensors")
    weights = {name: first_rows(p) for name, p in model.named_parameters()}
    save("exported_values", None, weights)


if __name__ == "__main__":
    main()
