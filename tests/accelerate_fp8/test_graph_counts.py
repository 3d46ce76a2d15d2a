"""Programs that torch.compile compiles under Accelerate have as many graphs in FP8 as in BF16."""

import json

import pytest
import torch

from tests.compiled_graphs import count_graphs

pytestmark = pytest.mark.slow
TEXT = ["the cat sat on a mat", "one dog ran in this park"] * 2


def _model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def _accelerator(folder, output, precision, regional=False):
    from accelerate import Accelerator
    from accelerate.utils import TorchDynamoPlugin

    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, dynamo_plugin=plugin)
    model = _model(folder)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    ids = torch.randint(0, 20, (2, 16))
    for _ in range(2):
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()


def _regional(folder, output, precision):
    _accelerator(folder, output, precision, regional=True)


def _arguments(output, precision):
    return {
        "output_dir": str(output),
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "torch_compile": True,
        "torch_compile_backend": "aot_eager",
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": precision == "bf16",
    }


def _trainer(folder, output, precision):
    from transformers import Trainer, TrainingArguments

    ids = torch.randint(0, 20, (4, 16))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(**_arguments(output, precision))
    Trainer(_model(folder), arguments, train_dataset=rows).train()


def _sft(folder, output, precision):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_dict({"text": TEXT})
    SFTTrainer(str(folder), SFTConfig(**_arguments(output, precision)), train_dataset=data).train()


PROGRAMS = (_accelerator, _regional, _trainer, _sft)


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_as_many_as_in_bf16(accelerate, monkeypatch, tiny_model, tmp_path, program, level):
    from accelerate.state import AcceleratorState

    def graphs(precision):
        AcceleratorState._reset_state(reset_partial_state=True)
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
        return count_graphs(lambda: program(tiny_model, tmp_path, precision))

    expected = graphs("bf16")
    monkeypatch.setenv("TORCH_FP8_CONFIG", json.dumps({"recipe": "tensorwise", "opt_level": level}))
    assert graphs("fp8") == expected
