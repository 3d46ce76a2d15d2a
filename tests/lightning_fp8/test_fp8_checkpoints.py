import lightning.fabric
from transformers import AutoModelForCausalLM
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from lightning_fp8 import FP8Precision
from tests.fp8_checkpoints import write_llama
from torch_fp8 import Float8Linear


def test_transformers_own_fp8_layers_are_taken_over(tmp_path, monkeypatch, log):
    """tests/accelerate_fp8 has what becomes of their values, and of those that are dequantized."""
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    write_llama(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    layer = type(model.model.layers[0].mlp.up_proj)
    fabric = lightning.fabric.Fabric(accelerator="cpu", plugins=FP8Precision(opt_level="O3"))
    fabric.setup(model)
    assert layer.__name__ == "FP8Linear"
    assert isinstance(model.model.layers[0].mlp.up_proj, Float8Linear)
    assert "14 are trained from their exact values" in log()
