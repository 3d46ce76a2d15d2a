"""The shortest fine-tuning loop by hand: Lightning Fabric, a Hugging Face model, JSONL.

python benchmarks/comparison/fabric_loop.py --precision fp8-mixed
"""

import script_start

if __name__ == "__main__":
    script_start.begin()

import argparse
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch_fp8_tools.compare import bf16_products
from transformers import AutoModelForCausalLM, AutoTokenizer

import assets
from instruction_data import load_examples, pack, stack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--assets", type=Path, default=Path("runs/assets"))
    arguments = parser.parse_args()

    bf16_products.choose()
    fabric = Fabric(precision=arguments.precision)
    fabric.launch()
    fabric.seed_everything(0)
    own = assets.prepare(assets.QUICK, arguments.assets)
    tokenizer = AutoTokenizer.from_pretrained(own.model)
    model = AutoModelForCausalLM.from_pretrained(own.model).train()
    rows = pack(load_examples(own.train, tokenizer, max_length=512), 512, tokenizer.pad_token_id)

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(
        torch.utils.data.DataLoader(rows, 4, shuffle=True, collate_fn=stack)
    )

    for step, batch in zip(range(arguments.steps), loader, strict=False):
        loss = model(**batch, use_cache=False).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        fabric.print(f"step {step + 1:3d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    script_start.run(main)
