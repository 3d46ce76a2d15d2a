import inspect

import lightning.fabric
import lightning_fabric
import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

from lightning_fp8 import FP8Config, FP8Precision
from tests.internals import Float8Optimizer, SplitWeight
from tests.lightning_fp8.hosts import each_fabric, make_net
from tests.tiny_gan import make_gan, train_gan

HOST = lightning.fabric


def make_fabric(host, config):
    config = config if isinstance(config, FP8Config) else FP8Config(opt_level=config)
    return host.Fabric(accelerator="cpu", devices=1, plugins=[FP8Precision(config)])


def together(fabric, net, optimizer):
    return fabric.setup(net, optimizer)


def model_first(fabric, net, optimizer):
    return fabric.setup_module(net), fabric.setup_optimizers(optimizer)


def optimizer_first(fabric, net, optimizer):
    optimizer = fabric.setup_optimizers(optimizer)
    return fabric.setup_module(net), optimizer


def loss(model):
    x = torch.linspace(-1, 1, 8 * 64).view(8, 64)
    return (model(x) - x).pow(2).mean()


def train(fabric, model, optimizers, steps=4):
    for _ in range(steps):
        fabric.backward(loss(model))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@each_fabric
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("set_up", [together, model_first, optimizer_first])
def test_optimizer_is_converted_with_its_model(host, level, set_up, log):
    fabric, net = make_fabric(host, level), make_net()
    parameters = list(net.parameters())
    given = AdamW(parameters, lr=1e-2)
    model, optimizer = set_up(fabric, net, given)
    fabric.backward(loss(model))
    gradient = type(net[0].weight.grad).__name__
    optimizer.step()
    assert all(a is b for a, b in zip(parameters, net.parameters(), strict=True))
    assert optimizer.optimizer is given
    assert isinstance(given, Float8Optimizer) == (level != "O1")
    assert isinstance(net[0].weight, SplitWeight) == (level != "O1")
    assert gradient == {"O1": "Tensor", "O2": "WideGrad", "O3": "Float8Grad"}[level]
    assert log().count("of the matmul FLOPs") == 1
    assert log().count("optimizer AdamW with 8-bit states") == (level != "O1")


@pytest.mark.skipif(
    "scheduler" not in inspect.signature(lightning.fabric.Fabric.setup).parameters,
    reason="Fabric.setup takes a scheduler since Lightning 2.6",
)
def test_several_optimizers_and_a_scheduler():
    fabric, net = make_fabric(HOST, "O2"), make_net()
    first = AdamW(net[0].parameters(), lr=1e-2)
    second = SGD(net[3].parameters(), lr=1e-2)
    scheduler = StepLR(first, 1, gamma=0.5)
    model, *optimizers, same = fabric.setup(net, first, second, scheduler=scheduler)
    train(fabric, model, optimizers, steps=1)
    same.step()
    assert first.param_groups[0]["lr"] == 5e-3
    assert isinstance(net[0].weight, SplitWeight)
    assert isinstance(net[3].weight, SplitWeight)


def test_optimizer_that_takes_over_goes_on_from_the_whole_weights():
    fabric, net = make_fabric(HOST, "O2"), make_net()
    first = AdamW(net.parameters(), lr=1e-2)
    model, wrapped = fabric.setup(net, first)
    train(fabric, model, [wrapped])
    whole = net[0].weight.detach().clone()
    assert not torch.equal(whole, whole.bfloat16().float())
    second = AdamW(net.parameters(), lr=1e-3)
    fabric.setup_optimizers(second)
    assert torch.equal(net[0].weight, whole)
    assert isinstance(second, Float8Optimizer)


def test_optimizer_of_another_model_is_left_alone():
    fabric, other = make_fabric(HOST, "O2"), make_net()
    fabric.setup(make_net())
    optimizer = AdamW(other.parameters())
    fabric.setup_optimizers(optimizer)
    assert type(optimizer) is AdamW
    assert other[0].weight.dtype == torch.float32


@pytest.mark.parametrize("order", ["nno", "non", "onn", "tn", "nt"])
def test_an_optimizer_of_several_models_splits_the_weights_of_each(order):
    fabric, nets = make_fabric(HOST, "O3"), [make_net(), make_net()]
    models, remaining = [], list(nets)
    given = AdamW([p for net in nets for p in net.parameters()], lr=1e-2)
    for step in order:  # a net, the optimizer, or both together
        if step == "n":
            models.append(fabric.setup_module(remaining.pop(0)))
        elif step == "o":
            optimizer = fabric.setup_optimizers(given)
        else:
            model, optimizer = fabric.setup(remaining.pop(0), given)
            models.append(model)
    fabric.backward(loss(models[0]) + loss(models[1]))
    weights = [layer.weight for net in nets for layer in (net[0], net[3])]
    assert [type(w) for w in weights] == [SplitWeight] * 4
    assert [type(w.grad).__name__ for w in weights] == ["Float8Grad"] * 4
    optimizer.step()


@each_fabric
def test_gradient_release(host):
    release = FP8Config(opt_level="O3", gradient_release=True)
    weights = []
    for config in (release, "O3"):
        fabric, net = make_fabric(host, config), make_net()
        model, optimizer = fabric.setup(net, AdamW(net.parameters(), lr=1e-2))
        train(fabric, model, [optimizer])
        weights.append(net[0].weight)
    assert torch.equal(*weights)

    fabric, net = make_fabric(host, release), make_net()
    model, optimizer = fabric.setup(net, AdamW(net.parameters(), lr=1e-2))
    fabric.backward(loss(model))
    assert net[0].weight.grad.untyped_storage().nbytes() == 0
    with pytest.raises(ValueError, match=r"gradient_release=True\) cannot clip gradients"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    with pytest.raises(RuntimeError, match="second gradient before"):
        fabric.backward(loss(model))


@pytest.mark.parametrize(
    ("host", "strategy"), [(HOST, "auto"), (HOST, "ddp"), (lightning_fabric, "auto")]
)
@pytest.mark.usefixtures("own_ranks")
def test_a_gan_with_a_critic_of_convolutions_trains_saves_and_resumes(
    host, strategy, log, tmp_path
):
    fabric = host.Fabric(accelerator="cpu", devices=1, precision="fp8-mixed", strategy=strategy)
    fabric.launch()
    generator, critic, criterion, of_generator, of_critic = make_gan()
    if strategy == "auto":  # torch's DDP takes no module without parameters
        criterion = fabric.setup(criterion)
    critic, of_critic = fabric.setup(critic, of_critic)
    generator = fabric.setup_module(generator)
    parts = generator, critic, criterion, fabric.setup_optimizers(of_generator), of_critic
    train_gan(fabric.backward, *parts)
    assert isinstance(of_critic.optimizer, Float8Optimizer)
    lines = [line for line in log().splitlines() if "Critic" in line or "BCE" in line]
    assert len(lines) == 1
    assert lines[0].startswith("FP8: Critic runs without FP8: no linear layer of Critic can run")
    names = "generator", "critic", "criterion", "of_generator", "of_critic"
    state = dict(zip(names, parts, strict=True))
    fabric.save(tmp_path / "gan.pt", state)
    on = train_gan(fabric.backward, *parts)
    fabric.load(tmp_path / "gan.pt", state)
    assert train_gan(fabric.backward, *parts) == on


@each_fabric
def test_training_without_any_module_in_fp8_is_refused_at_the_first_backward(host):
    fabric = make_fabric(host, "O2")
    critic = fabric.setup(make_gan()[1])
    result = critic(torch.randn(8, 24, 4, 4)).sum()
    message = r"'3': out_features=15 .*16 or more features.*precision='bf16-mixed'"
    with pytest.raises(ValueError, match=message):
        fabric.backward(result)
    fabric.setup(make_net())
    fabric.backward(result)
