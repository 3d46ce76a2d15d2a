"""Opens checkpoints with stock libraries alone. Usage: stock_reader.py MODEL_FOLDER STATE_FOLDER"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

pretrained, state = map(Path, sys.argv[1:])
model, loading = AutoModelForCausalLM.from_pretrained(pretrained, output_loading_info=True)
assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def total(model):
    with torch.no_grad():
        return model.eval()(torch.arange(8)[None]).logits.double().sum().item()


logits = total(model)
accelerator = Accelerator(cpu=True)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.load_state(state)
torch.load(state / "optimizer.bin", weights_only=True)
tensors = load_file(state / "model.safetensors")
assert {type(tensor) for tensor in tensors.values()} == {torch.Tensor}
assert sorted(tensors) == sorted(
    name for name in model.state_dict() if name != "lm_head.weight" or name in tensors
)
ours = [name for name in sys.modules if name.split(".")[0] in ("torch_fp8", "accelerate_fp8")]
print(json.dumps({"ours": ours, "logits": logits, "resumed": total(model)}))
