import copy
import gc
import importlib
import pickle
import weakref

import lightning.fabric
import lightning.pytorch
import lightning.pytorch.demos.boring_classes
import lightning_fabric
import pytest
import pytorch_lightning
import pytorch_lightning.demos.boring_classes
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_fp8 import FP8Config, FP8FSDPStrategy, FP8Precision
from tests.internals import lightning_register as _register
from tests.lightning_fp8.hosts import FABRICS, QUIET, TRAINERS, each_fabric, each_host, each_trainer
from torch_fp8 import Float8Linear, scaling_state_dict

DELAYED = FP8Config(recipe="delayed", amax_history_len=4)


def make_net():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))


def make_model(host, net=None):
    class Regression(host.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_net() if net is None else net
            self.seen = []

        def training_step(self, batch, batch_idx):
            self.seen.append((type(self.net[0]), torch.is_autocast_enabled("cpu")))
            return self.net(batch).float().pow(2).mean()

        def validation_step(self, batch, batch_idx):
            self.seen.append((type(self.net[0]), self.net(batch).dtype))

        test_step = validation_step

        def predict_step(self, batch, batch_idx):
            self.validation_step(batch, batch_idx)
            return self.net(batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return Regression()


def make_trainer(host, tmp_path, **kwargs):
    options = {"max_epochs": 1, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    return host.Trainer(default_root_dir=tmp_path, **{**QUIET, **options, **kwargs})


def make_host(host, **kwargs):
    if hasattr(host, "Trainer"):
        made = host.Trainer(accelerator="cpu", devices=1, logger=False, **kwargs)
        return made, made.strategy.precision_plugin
    made = host.Fabric(accelerator="cpu", devices=1, **kwargs)
    return made, made.strategy.precision


def lightning_accelerator():
    return lightning.fabric.accelerators.CPUAccelerator()


def data(num=4):
    return DataLoader(torch.randn(4 * num, 32), batch_size=4)


# -- which plugin ------------------------------------------------------------------------------


@each_host
@pytest.mark.parametrize("given", ["flag", "plugin", "list", "tuple"])
def test_every_host_gets_the_plugin_of_its_own_copy(host, given):
    request = FP8Precision(FP8Config(recipe="rowwise"))
    choices = {
        "flag": {"precision": "fp8-mixed"},
        "plugin": {"plugins": request},
        "list": {"plugins": [request]},
        "tuple": {"plugins": (request,)},
    }
    made, plugin = make_host(host, **choices[given])
    base = importlib.import_module(f"{host.__name__}.plugins.precision").MixedPrecision
    assert isinstance(plugin, base)
    assert isinstance(plugin, FP8Precision)
    assert plugin.precision == "fp8-mixed"
    assert plugin.config == (FP8Config() if given == "flag" else request.config)
    assert made.strategy.setup_environment.func == plugin._setup_environment  # compares ranks


@each_host
def test_one_request_serves_several_hosts(host):
    request = FP8Precision()
    plugins = [make_host(h, plugins=[request])[1] for h in (host, *TRAINERS, *FABRICS, host)]
    assert len({id(plugin) for plugin in plugins}) == len(plugins)
    assert type(plugins[0]) is type(plugins[-1])


@each_trainer
def test_cli_takes_the_plugin_with_its_configuration(host, tmp_path):
    family = {lightning.pytorch: "unified", pytorch_lightning: "standalone"}[host]
    config = {"recipe": "rowwise", "skip": ["lm_head", "net.2"]}
    plugin = {
        "class_path": f"lightning_fp8.{family}_trainer.FP8Precision",
        "init_args": {"config": config},
    }
    trainer = {"accelerator": "cpu", "devices": 1, "logger": False, "plugins": [plugin]}
    cli = importlib.import_module(f"{host.__name__}.cli").LightningCLI(
        host.demos.boring_classes.BoringModel, args={"trainer": trainer}, run=False
    )
    given = cli.trainer.precision_plugin.config
    assert given == FP8Config(recipe="rowwise", skip=("lm_head", "net.2"))


@each_host
def test_explicit_other_plugin_wins(host):
    other = importlib.import_module(f"{host.__name__}.plugins.precision").HalfPrecision("bf16-true")
    assert make_host(host, plugins=[other])[1] is other


def test_environment_gives_the_configuration_and_an_explicit_one_wins(monkeypatch):
    monkeypatch.setenv("TORCH_FP8_CONFIG", '{"recipe": "rowwise"}')
    _, by_flag = make_host(lightning.pytorch, precision="fp8-mixed")
    _, explicit = make_host(lightning.pytorch, plugins=[FP8Precision(DELAYED)])
    assert (by_flag.config.recipe, explicit.config.recipe) == ("rowwise", "delayed")
    monkeypatch.setenv("TORCH_FP8_CONFIG", '{"recipes": "rowwise"}')
    with pytest.raises(ValueError, match="TORCH_FP8_CONFIG: unknown FP8Config option"):
        make_host(lightning.pytorch, precision="fp8-mixed")


def test_subclass_of_the_request_is_refused_with_the_class_to_derive_from():
    class Mine(FP8Precision):
        pass

    with pytest.raises(TypeError, match=r"derive from lightning_fp8.unified_trainer.FP8Precision"):
        make_host(lightning.pytorch, plugins=[Mine()])


@pytest.mark.parametrize("module", _register.PLUGINS.values())
def test_plugin_pickles_and_leaves_the_models_of_this_process_behind(module):
    plugin = importlib.import_module(module).FP8Precision(DELAYED)
    plugin.attach(lightning.pytorch.strategies.SingleDeviceStrategy(), lightning_accelerator())
    plugin.convert_module(net := make_net())
    for other in (pickle.loads(pickle.dumps(plugin)), copy.deepcopy(plugin)):
        assert type(other) is type(plugin)
        assert other.config == DELAYED
        assert other.state_dict() == {}
    assert plugin.state_dict()
    assert isinstance(net[0], Float8Linear)


# -- strategies --------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{"precision": "fp8-mixed"}, {"plugins": [FP8Precision()]}])
@pytest.mark.parametrize(
    ("host", "name", "advice"),
    [
        (lightning.pytorch, "FSDPStrategy", "ModelParallelStrategy"),
        (pytorch_lightning, "FSDPStrategy", "ModelParallelStrategy"),
        (lightning.fabric, "FSDPStrategy", "ModelParallelStrategy"),
        (lightning_fabric, "FSDPStrategy", "ModelParallelStrategy"),
        (lightning.fabric, "DataParallelStrategy", "strategy='ddp'"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_strategy_that_cannot_host_fp8_is_refused_for_others(
    monkeypatch, host, name, advice, given
):
    # Lightning refuses FSDP on the CPU before it looks at the precision.
    for connector in _register.PLUGINS:
        cls = importlib.import_module(connector)
        cls = getattr(cls, "_Connector", None) or cls._AcceleratorConnector
        monkeypatch.setattr(cls, "_check_strategy_and_fallback", lambda self: None)
    strategy = getattr(importlib.import_module(f"{host.__name__}.strategies"), name)()
    with pytest.raises(ValueError, match=rf"does not run under {name}: use {advice}"):
        make_host(host, strategy=strategy, **given)


def test_deepspeed_by_name_is_refused_before_the_host_asks_for_its_library():
    message = "does not run under DeepSpeedStrategy: use ModelParallelStrategy"
    for host in (lightning.pytorch.Trainer, lightning.fabric.Fabric):
        for asked in ({"precision": "fp8-mixed"}, {"plugins": [FP8Precision()]}):
            with pytest.raises(ValueError, match=message):
                host(strategy="deepspeed_stage_2", accelerator="cpu", **asked)


@pytest.mark.parametrize("strategy", [FP8FSDPStrategy, ModelParallelStrategy])
def test_strategy_that_shards_is_refused_with_transformer_engine(te, strategy):
    plugin = FP8Precision(FP8Config(backend="transformer-engine"))
    with pytest.raises(ValueError, match="one device and under DDP"):
        make_host(lightning.pytorch, plugins=[plugin], strategy=strategy())


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy", "MegatronStrategy"])
def test_subclass_of_a_refused_strategy_is_refused(name):
    """By name: neither DeepSpeed nor NeMo need be installed."""
    mine = type("Mine", (type(name, (), {}),), {})()
    plugin = importlib.import_module("lightning_fp8.unified_fabric").FP8Precision()
    with pytest.raises(ValueError, match=rf"does not run under {name}: use ModelParallelStrategy"):
        plugin.attach(mine, lightning_accelerator())


@each_trainer
def test_device_that_the_strategy_uses_is_the_one_checked(host, monkeypatch, tmp_path):
    trainer, plugin = make_host(host, precision="fp8-mixed")
    monkeypatch.setattr(type(trainer.strategy), "root_device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A100")
    net = make_net()
    with pytest.raises(ValueError, match=r"NVIDIA A100 \(sm_80\) has no FP8 tensor cores"):
        plugin.convert_module(net)
    assert type(net[0]) is nn.Linear


# -- what runs ---------------------------------------------------------------------------------


@each_trainer
def test_trainer_converts_for_each_verb_and_leaves_a_stock_model(host, tmp_path):
    model = make_model(host)
    parameters = list(model.parameters())
    trainer = make_trainer(host, tmp_path, precision="fp8-mixed")
    for verb in (trainer.fit, trainer.validate, trainer.test, trainer.predict):
        model.seen.clear()
        verb(model, data(2))
        assert {cls for cls, _ in model.seen} == {Float8Linear}, verb.__name__
        assert {type(m) for m in model.net} == {nn.Linear, nn.ReLU}
        expected = True if verb == trainer.fit else torch.bfloat16
        assert {seen for _, seen in model.seen} == {expected}
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


@each_fabric
def test_fabric_does_not_keep_a_model_alive(host):
    fabric, plugin = make_host(host, plugins=[FP8Precision(DELAYED)])
    first, second = make_net(), make_net()
    gone = weakref.ref(first)
    fabric.setup(first)
    fabric.setup(second)
    assert len(plugin.state_dict()["scaling"][0]) == 2
    del first
    gc.collect()
    assert gone() is None
    assert len(plugin.state_dict()["scaling"][0]) == 1


@each_trainer
def test_model_without_linears_is_an_error(host, tmp_path):
    net = nn.Sequential(nn.Conv1d(32, 16, 1), nn.ReLU())
    trainer = make_trainer(host, tmp_path, precision="fp8-mixed")
    with pytest.raises(
        ValueError, match=r"no nn\.Linear.*16 or more features.*precision='bf16-mixed'"
    ):
        trainer.fit(make_model(host, net), data())


# -- the start-up summary ----------------------------------------------------------------------


@pytest.fixture
def summaries(logged):
    return lambda: [message for message in logged if "matmul FLOPs" in message]


@each_trainer
def test_trainer_summary_is_logged_once_per_model_with_the_optimizer(host, tmp_path, summaries):
    trainer, model = make_trainer(host, tmp_path, precision="fp8-mixed"), make_model(host)
    trainer.fit(model, data(2))
    trainer.validate(model, data(2), verbose=False)
    (summary,) = summaries()
    assert "FP8: 2 of 2 linear layers" in summary
    assert "auto -> tensorwise" in summary
    assert "emulation on CPU" in summary
    assert "16.00 bytes per parameter" in summary  # AdamW's moments are known here
    trainer.validate(make_model(host), data(2), verbose=False)
    assert len(summaries()) == 2


@each_trainer
def test_another_fit_of_the_same_model_repeats_no_summary(host, tmp_path, summaries):
    model = make_model(host)
    for _ in range(2):
        make_trainer(host, tmp_path, precision="fp8-mixed").fit(model, data(2))
    assert len(summaries()) == 1
    make_trainer(host, tmp_path, plugins=[FP8Precision(recipe="rowwise")]).fit(model, data(2))
    assert len(summaries()) == 2


@each_trainer
def test_auto_measures_once_and_leaves_a_layer_in_bf16(host, tmp_path, summaries, timed):
    recipes = ("tensorwise", "rowwise", "blockwise")
    wins, loses = (dict(zip(recipes, us, strict=True)) for us in ((60, 50, 70), (30, 30, 30)))
    clock = timed({(64, 32): (100, wins), (16, 64): (20, loses)})
    plugin = FP8Precision(FP8Config(tokens=8))
    trainer, model = make_trainer(host, tmp_path, plugins=[plugin]), make_model(host)
    trainer.fit(model, data(2))
    num_runs = len(clock.runs)
    assert num_runs > 0
    assert [kind for kind, _ in model.seen] == [Float8Linear] * 2
    (summary,) = summaries()
    assert "FP8: 1 of 2 linear layers" in summary
    assert "auto -> rowwise: " in summary
    assert "net.2: 16x64 is not faster in FP8: 30 us against 20 us in BF16 at 8 tokens" in summary
    trainer.fit(model, data(2))
    assert len(clock.runs) == num_runs
    assert [type(layer) for layer in model.net] == [nn.Linear, nn.ReLU, nn.Linear]


@each_fabric
def test_fabric_summary_is_logged_once_the_optimizers_are_known(host, summaries):
    fabric, _ = make_host(host, precision="fp8-mixed")
    net, later, alone = make_net(), make_net(), make_net()
    fabric.setup(net, torch.optim.AdamW(net.parameters()))
    assert "FP8: 2 of 2 linear layers" in summaries()[0]
    assert "optimizer AdamW" in summaries()[0]
    model, _ = fabric.setup_module(later), fabric.setup_module(alone)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    assert len(summaries()) == 1
    for _ in range(2):
        fabric.backward(model(torch.randn(4, 32)).sum())
        optimizer.step()
        assert len(summaries()) == 3
    assert "optimizer SGD keeps its own states" in summaries()[1]
    assert "optimizer" not in summaries()[2]


# -- delayed scaling over a teardown ------------------------------------------------------------


@each_trainer
def test_history_survives_the_teardown_between_two_verbs(host, tmp_path):
    trainer = make_trainer(host, tmp_path, plugins=[FP8Precision(DELAYED)])
    model = make_model(host)
    trainer.fit(model, data(4))
    saved = trainer.precision_plugin.state_dict()["scaling"][0][0]
    assert saved["net.0.amax_history"].count_nonzero() == 3 * 4
    at_validation = []
    model.on_validation_start = lambda: at_validation.append(scaling_state_dict(model))
    trainer.validate(model, data(1), verbose=False)
    torch.testing.assert_close(at_validation[0], saved, rtol=0, atol=0)
    torch.testing.assert_close(trainer.precision_plugin.state_dict()["scaling"][0][0], saved)
