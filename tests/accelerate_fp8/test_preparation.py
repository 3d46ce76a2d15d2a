import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.internals import Float8Optimizer, SplitWeight
from tests.tiny_gan import make_gan, train_gan
from torch_fp8 import Float8Linear


def _at_once(accelerator, parts):
    return tuple(accelerator.prepare(*parts))


def _one_by_one(accelerator, parts):
    """The criterion first, then the critic with its optimizer, then the generator."""
    generator, critic, criterion, of_generator, of_critic = parts
    criterion = accelerator.prepare(criterion)
    critic, of_critic = accelerator.prepare(critic, of_critic)
    generator = accelerator.prepare_model(generator)
    return generator, critic, criterion, accelerator.prepare(of_generator), of_critic


@pytest.mark.parametrize("prepare", [_at_once, _one_by_one])
def test_a_gan_with_a_critic_of_convolutions_trains_saves_and_resumes(
    tmp_path, fp8, messages, prepare
):
    parts = prepare(fp8, make_gan())
    generator, critic, criterion, _, of_critic = parts
    train_gan(fp8.backward, *parts)
    assert sum(isinstance(m, Float8Linear) for m in generator.modules()) == 2
    assert not any(isinstance(m, Float8Linear) for m in critic.modules())
    assert not any("fp8" in name for name in vars(criterion))
    assert isinstance(of_critic.optimizer, Float8Optimizer)
    lines = [line for line in messages() if "Critic" in line or "BCE" in line]
    assert len(lines) == 1
    assert "FP8: Critic runs without FP8: no linear layer of Critic can run" in lines[0]
    fp8.save_state(str(tmp_path))
    on = train_gan(fp8.backward, *parts)
    fp8.load_state(str(tmp_path))
    assert train_gan(fp8.backward, *parts) == on


@pytest.mark.parametrize("evaluation_mode", [False, True])
def test_training_without_any_model_in_fp8_is_refused_at_the_first_backward(fp8, evaluation_mode):
    critic = fp8.prepare_model(make_gan()[1], evaluation_mode=evaluation_mode)
    loss = critic(torch.randn(8, 24, 4, 4)).sum()
    with pytest.raises(
        ValueError, match=r"'3': out_features=15 .*16 or more features.*_precision='bf16'"
    ):
        fp8.backward(loss)
    fp8.prepare(nn.Linear(32, 32))
    fp8.backward(loss)


def test_a_model_without_fp8_layers_is_saved_with_whole_weights(tmp_path, fp8):
    critic = make_gan()[1]
    before = {name: value.clone() for name, value in critic.state_dict().items()}
    critic, _ = fp8.prepare(critic, torch.optim.AdamW(critic.parameters()))
    assert isinstance(critic[3].weight, SplitWeight)
    fp8.save_model(critic, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for name, value in before.items():
        assert saved[name].dtype == torch.float32
        assert torch.allclose(saved[name], value, atol=1e-6), name


def test_a_frozen_feature_extractor_passes(fp8):
    extractor = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).requires_grad_(False).eval()
    generator, _, _, optimizer, _ = make_gan()
    extractor = fp8.prepare(extractor)
    generator, optimizer = fp8.prepare(generator, optimizer)
    made = generator(torch.randn(4, 16))[:, :3]
    fp8.backward(extractor(made).pow(2).mean())
    assert generator[0].weight.grad is not None


def test_a_model_that_is_trained_though_prepared_for_evaluation_has_a_summary(fp8, messages):
    # as transformers prepares a model that it has sharded itself
    model = fp8.prepare_model(make_gan()[0], evaluation_mode=True)
    assert "prepared with evaluation_mode=True" in messages()[-1]
    fp8.prepare(torch.optim.AdamW(model.parameters()))
    assert "model     Generator" in messages()[-1]
    assert "bytes per parameter" in messages()[-1]
    fp8.prepare(torch.optim.AdamW(model.parameters()))
    assert sum("model     Generator" in message for message in messages()) == 1
