import lightning.fabric
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lightning_fp8 import FP8Precision
from tests.fp8_checkpoints import write_llama


def test_a_model_of_an_fp8_checkpoint_is_taken_over_and_saved_right(tmp_path):
    """tests/accelerate_fp8 has what is taken over; stock saves codes without a configuration."""
    source, out = tmp_path / "source", tmp_path / "out"
    write_llama(source)
    model = AutoModelForCausalLM.from_pretrained(source)
    fabric = lightning.fabric.Fabric(accelerator="cpu", plugins=FP8Precision(opt_level="O3"))
    fabric.setup(model, torch.optim.AdamW(model.parameters()))
    model.save_pretrained(out)
    stored, trained = load_file(out / "model.safetensors"), model.state_dict()
    assert stored.keys() == trained.keys()
    assert all(torch.equal(stored[key], trained[key]) for key in stored)
