import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from accelerate_fp8 import FP8Config, FP8Kwargs
from tests.fp8_checkpoints import tiny_llama
from torch_fp8 import export

CONFIG = FP8Config(recipe="blockwise", save_format="fine-grained")
TOKENS = torch.arange(32).view(2, 16) * 7 % 256


def _accelerator(accelerate, config=CONFIG):
    return accelerate.Accelerator(
        mixed_precision="fp8", kwargs_handlers=[FP8Kwargs(config)], cpu=True
    )


def _trained(accelerate, config=CONFIG):
    accelerator = _accelerator(accelerate, config)
    model = tiny_llama().float()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for _ in range(2):
        accelerator.backward(model(TOKENS, labels=TOKENS).loss)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator, model


def _same(a, b):
    for name in ("model.safetensors", "config.json"):
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


@pytest.mark.long
@pytest.mark.parametrize("how", ["save_pretrained", "save_model", "unwrapped"])
def test_the_hosts_save_what_export_writes(accelerate, tmp_path, how):
    accelerator, model = _trained(accelerate)
    export(model, tmp_path / "own")
    folder = tmp_path / "out"
    if how == "save_pretrained":
        model.save_pretrained(folder)
    elif how == "save_model":
        accelerator.save_model(model, folder)
    else:
        unwrapped = accelerator.unwrap_model(model)
        state = accelerator.get_state_dict(model)
        unwrapped.save_pretrained(folder, state_dict=state, save_function=accelerator.save)
    _same(tmp_path / "own", folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    key = "model.layers.0.mlp.up_proj.weight"
    assert stored[key].dtype == torch.float8_e4m3fn
    scale = stored[f"{key}_scale_inv"].repeat_interleave(128, 0)
    expected = (stored[key].float() * scale).bfloat16()
    assert torch.equal(loaded.state_dict()[key], expected)
    accelerator.backward(model(TOKENS, labels=TOKENS).loss)  # training goes on


def test_a_save_that_fails_leaves_the_files_of_the_last_one(accelerate, tmp_path):
    _, model = _trained(accelerate)
    model.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"'model.layers.1.mlp.down_proj.weight' holds an Inf"):
        model.save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_trainers_checkpoints_are_whole_and_its_model_is_exported(
    accelerate, tmp_path, monkeypatch
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("TORCH_FP8_CONFIG", CONFIG.to_json())
    data = [{"input_ids": TOKENS[0], "labels": TOKENS[0]}] * 4

    def trainer():
        arguments = TrainingArguments(
            str(tmp_path / "out"),
            max_steps=2,
            save_steps=1,
            per_device_train_batch_size=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        return Trainer(tiny_llama().float(), arguments, train_dataset=data)

    first = trainer()
    first.train()
    first.save_model()
    checkpoint = load_file(tmp_path / "out" / "checkpoint-1" / "model.safetensors")
    assert {tensor.dtype for tensor in checkpoint.values()} == {torch.float32}
    final = load_file(tmp_path / "out" / "model.safetensors")
    assert final["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    second = trainer()
    second.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    second.save_model(str(tmp_path / "again"))
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(
        torch.equal(final[key].view(torch.uint8), again[key].view(torch.uint8)) for key in final
    )


def test_what_the_format_cannot_hold_is_refused_before_training(accelerate):
    with pytest.raises(
        ValueError, match=r"save_format='fine-grained' cannot express recipe='rowwise'"
    ):
        FP8Config(recipe="rowwise", save_format="fine-grained")
    config = FP8Config(save_format="modelopt")  # auto chooses tensorwise on a CPU
    with pytest.raises(ValueError, match=r"cannot express recipe 'tensorwise'.*compressed-tensors"):
        _trained(accelerate, config)
    accelerator = _accelerator(accelerate)
    with pytest.raises(TypeError, match="Sequential has no such config"):
        accelerator.prepare(nn.Sequential(nn.Linear(128, 128)))


def test_sharded_models_are_refused_before_training(accelerate, monkeypatch):
    from accelerate.utils import DistributedType

    from tests.internals import accelerate_export as of_hosts

    for format, kind in ((None, DistributedType.FSDP), ("fine-grained", DistributedType.MULTI_GPU)):
        of_hosts.refuse_sharded_saving(FP8Config(save_format=format), kind)
    with pytest.raises(ValueError, match="run torch-fp8 export on the saved checkpoint"):
        of_hosts.refuse_sharded_saving(CONFIG, DistributedType.FSDP)


def test_adapters_and_models_that_they_are_merged_into_are_saved_as_ever(accelerate, tmp_path):
    """Merged into FP8, most of a small adapter would be lost: that has to be asked for."""
    from peft import LoraConfig, get_peft_model

    accelerator = _accelerator(accelerate)
    model = get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules=["q_proj"]))
    trained = [p for p in model.parameters() if p.requires_grad]
    model, _ = accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-3))
    model.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    stored = load_file(tmp_path / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
