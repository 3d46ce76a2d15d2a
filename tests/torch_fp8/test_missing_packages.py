import json
import math
from pathlib import Path

import pytest
import torch

from tests.internals import RunLog
from tests.processes import ran
from tests.steps import adamw
from torch_fp8 import FP8Config

pytestmark = pytest.mark.long
SCRIPT = Path(__file__).with_name("missing_packages.py")
MODEL = ("plan", "plan lora", "export")
"""Commands for which transformers builds a model."""
UNUSED = "accelerate,lightning,pytorch_lightning,lightning_fabric,trl,triton,datasets,torchao"
CASES = {
    UNUSED: {"plan lora": "peft"},  # which needs accelerate
    "safetensors": dict.fromkeys(MODEL, "transformers"),
    f"transformers,peft,matplotlib,numpy,safetensors,huggingface_hub,{UNUSED}": {
        **dict.fromkeys(MODEL, "transformers"),
        "report": "matplotlib",
    },
}
"""Packages that are missing -> command -> the package that it names."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("inputs")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "vocab_size": 96, "max_position_embeddings": 64}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    model.save_pretrained(folder / "model")
    config = FP8Config(checkpoint_states="fp8")
    layer = torch.nn.Linear(64, 64)
    optimizer, _ = adamw(layer, config)
    layer(torch.ones(16, 64)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    names = [f"fp8/layers.{i}/input/sqnr" for i in range(2)]
    log = RunLog(folder / "run", names, {"monitor": 10})
    for step in range(10, 50, 10):
        losses = [[s, 5 * math.exp(-s / 60)] for s in range(step - 9, step + 1)]
        log.write(step, values=[31.0, 30.0], losses=losses)
    return folder


@pytest.mark.parametrize("hidden", CASES, ids=lambda hidden: hidden.replace(UNUSED, "others"))
def test_a_command_works_or_names_a_package(hidden, inputs, forked_python, tmp_path):
    for path in inputs.iterdir():
        (tmp_path / path.name).symlink_to(path)
    done = ran(forked_python, SCRIPT, tmp_path, hidden)
    results = json.loads(done.stdout.splitlines()[-1])
    wanted = CASES[hidden]
    for command, (status, errors) in results.items():
        progress = ("Loading weights", "importing each installed host")
        lines = [x for x in errors.splitlines() if x.strip() and not x.startswith(progress)]
        if command not in wanted:
            assert (status, lines) == (0, []), command
            continue
        assert status in (1, 2), command
        (line,) = lines
        assert line.startswith(f"torch-fp8 {command.split()[0]}: ")
        assert f"pip install {wanted[command]}" in line
        assert "bug in torch-fp8" not in line
