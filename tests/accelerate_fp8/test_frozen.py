import copy

import pytest
import torch
from torch import nn

import torch_fp8
from accelerate_fp8 import FP8Config
from tests.fp8_checkpoints import LiveStorages
from tests.internals import Float8FrozenWeight


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 96)
        self.down = nn.Linear(96, 64)
        self.lm_head = nn.Linear(64, 64)

    def forward(self, x):
        return self.lm_head(self.down(self.up(x).relu()))


def is_frozen(model):
    return [isinstance(m.weight, Float8FrozenWeight) for m in (model.up, model.down)]


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_reference_is_frozen_when_training_begins(accelerator_with, messages, level):
    accelerator = accelerator_with(FP8Config(recipe="tensorwise", opt_level=level))
    policy, reference = Net(), Net()
    evaluated = accelerator.prepare_model(reference, evaluation_mode=True)
    assert is_frozen(reference) == [False, False], "it may yet be the model that is trained"
    optimizer = torch.optim.AdamW(policy.parameters())
    policy, optimizer = accelerator.prepare(policy, optimizer)
    assert is_frozen(reference) == [True, True]
    assert type(reference.lm_head.weight) is nn.Parameter
    assert "FP8: Net, which no optimizer trains: 2 frozen weights stored in FP8" in messages()[-1]
    x = torch.randn(4, 64)
    loss = (policy(x) - evaluated(x).detach()).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    assert is_frozen(policy) == [False, False]


@pytest.mark.parametrize("options", [{"opt_level": "O1"}, {"frozen_weights": "keep"}])
def test_it_stays_as_it_is_where_the_configuration_says_so(accelerator_with, options):
    accelerator = accelerator_with(FP8Config(recipe="tensorwise", **options))
    policy, reference = Net(), Net()
    accelerator.prepare_model(reference, evaluation_mode=True)
    accelerator.prepare(policy, torch.optim.AdamW(policy.parameters()))
    assert is_frozen(reference) == [False, False]


def test_the_trained_model_is_evaluated_first_and_stays(accelerator_with):
    accelerator = accelerator_with(FP8Config(recipe="tensorwise"))
    model = Net()
    accelerator.prepare_model(model, evaluation_mode=True)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    assert is_frozen(model) == [False, False]
    other = Net()
    accelerator.prepare(other, torch.optim.AdamW(other.parameters()))
    assert is_frozen(model) == [False, False]


def test_one_that_is_prepared_after_the_optimizer_is_frozen_at_once(accelerator_with):
    accelerator = accelerator_with(FP8Config(recipe="tensorwise"))
    policy, reference = Net(), Net()
    accelerator.prepare(policy, torch.optim.AdamW(policy.parameters()))
    accelerator.prepare_model(reference, evaluation_mode=True)
    assert is_frozen(reference) == [True, True]


def test_training_a_frozen_reference_later_is_refused_by_name(accelerator_with):
    accelerator = accelerator_with(FP8Config(recipe="tensorwise"))
    policy, reference = Net(), Net()
    accelerator.prepare_model(reference, evaluation_mode=True)
    accelerator.prepare(policy, torch.optim.AdamW(policy.parameters()))
    optimizer = torch.optim.AdamW(reference.parameters())
    with pytest.raises(ValueError, match=r"'up\.weight' of Net, .*torch_fp8\.thaw"):
        accelerator.prepare(reference, optimizer)
    torch_fp8.thaw(reference)
    accelerator.prepare(reference, torch.optim.AdamW(reference.parameters()))


def test_training_a_sharded_one_later_is_refused_by_name(single_process_group):
    from torch.distributed.fsdp import fully_shard

    from tests.internals import EvaluationModels
    from torch_fp8.distributed import connect_fsdp

    config = FP8Config(recipe="tensorwise")
    reference = Net()
    torch_fp8.convert_to_float8(reference, config)
    fully_shard(reference)
    connect_fsdp(reference, config)
    models = EvaluationModels(config)
    models.note(reference)
    (report,) = models.freeze([torch.optim.AdamW(Net().parameters())]).values()
    assert report.frozen == ("up", "down")
    with pytest.raises(ValueError, match=r"'up\.weight' of .*Net, .*torch_fp8\.thaw"):
        models.freeze([torch.optim.AdamW(reference.parameters())])


def test_a_frozen_model_is_offloaded_to_the_cpu(accelerate):
    model = Net()
    torch_fp8.freeze(model, FP8Config(recipe="blockwise"))
    x = torch.randn(4, 64)
    expected = model(x)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    for _ in range(2):
        assert torch.equal(model(x), expected)


def test_what_trl_writes_to_a_reference_is_quantized_anew(accelerator_with):
    from trl.trainer.callbacks import SyncRefModelCallback

    accelerator = accelerator_with(FP8Config(recipe="tensorwise"))
    policy, reference = Net(), Net()
    accelerator.prepare_model(reference, evaluation_mode=True)
    trained = copy.deepcopy(policy)
    accelerator.prepare(policy, torch.optim.AdamW(policy.parameters()))
    before = reference.up.weight.dequantize().float()
    SyncRefModelCallback.sync_target_model(trained, reference, alpha=0.6)
    expected = 0.4 * before + 0.6 * trained.up.weight.detach()
    assert is_frozen(reference) == [True, True]
    difference = (reference.up.weight.dequantize().float() - expected).norm() / expected.norm()
    assert difference < 0.04
    SyncRefModelCallback.sync_target_model(trained, reference, alpha=1.0)
    exact = trained.up.weight
    assert (reference.up.weight.dequantize() - exact).norm() / exact.norm() < 0.03


class Deep(nn.Sequential):
    """64 layers of 128 x 128, in BF16 or float32."""

    def __init__(self, dtype):
        super().__init__(*(nn.Linear(128, 128, dtype=dtype) for _ in range(64)))


def adapted(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_preparing_the_models_of_rlhf_never_holds_a_second_copy_of_one(accelerator_with, lora):
    accelerator = accelerator_with(FP8Config(recipe="tensorwise"))
    one = 64 * 128 * 128
    with LiveStorages() as storages:
        models = [Deep(torch.float32), Deep(torch.float32), Deep(torch.bfloat16)]
        policy, reference, reward = models
        if lora:
            policy = adapted(policy)
        del models
        before = storages.alive
        assert before > (4 + 4 + 2) * one
        storages.peak = 0
        for model in (reference, reward):
            accelerator.prepare_model(model, evaluation_mode=True)
        trained = [p for p in policy.parameters() if p.requires_grad]
        accelerator.prepare(policy, torch.optim.AdamW(trained))
        after = storages.alive
    assert storages.peak <= before + 8 * 4 * 128 * 128, "float32 temporaries of one weight"
    others = 64 * (3 * 4 * 128 + 16 + 2 * 4 * 4 * 128 * lora)  # biases, scales and adapters
    held = (1 + 1 + 1) if lora else (2 + 1 + 1 + 1)  # FP8 alone; BF16 and 8 bits below it
    assert after <= 1.02 * held * one + others
    assert len([p for p in reward.parameters() if isinstance(p, Float8FrozenWeight)]) == 64
