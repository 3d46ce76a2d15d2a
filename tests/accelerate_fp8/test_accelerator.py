import gc
import logging
import sys
import weakref

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn

import accelerate_fp8
from accelerate_fp8 import FP8Config, FP8Kwargs
from tests.internals import preparation_of
from torch_fp8 import Float8Linear
from torch_fp8.ops import scaled_mm


class Block(nn.Module):
    def __init__(self, num_features=32):
        super().__init__()
        self.up = nn.Linear(num_features, 2 * num_features)
        self.down = nn.Linear(2 * num_features, num_features)
        self.lm_head = nn.Linear(num_features, num_features)

    def forward(self, x):
        return self.lm_head(self.down(self.up(x).relu()))


@pytest.fixture
def gemms(monkeypatch):
    calls: list[torch.dtype] = []
    name = "_scaled_mm_v2" if scaled_mm._CPU_HAS_OPERATOR else "_scaled_mm"  # torch 2.11
    original = getattr(torch, name)

    def counted(*args, **kwargs):
        calls.append(kwargs["out_dtype"] if "out_dtype" in kwargs else args[9])
        result: torch.Tensor = original(*args, **kwargs)
        return result

    monkeypatch.setattr(torch, name, counted)
    return calls


def test_forward_runs_in_bf16_between_the_layers_and_returns_float32(fp8, gemms):
    model = fp8.prepare(Block())
    output = model(torch.randn(4, 32))
    assert output.dtype == torch.float32
    assert gemms == [torch.bfloat16] * 2


def test_auto_leaves_in_bf16_what_is_no_faster_in_fp8(accelerate, gemms, timed):
    fast, slow = (dict.fromkeys(("tensorwise", "rowwise", "blockwise"), us) for us in (50, 200))
    timed({(64, 32): (100, fast), (32, 64): (100, slow)})
    handler = FP8Kwargs(FP8Config(tokens=8))
    fp8 = accelerate.Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[handler])
    model = Block()
    model, optimizer = fp8.prepare(model, torch.optim.AdamW(model.parameters()))
    assert [type(m) for m in (model.up, model.down)] == [Float8Linear, nn.Linear]
    gemms.clear()
    fp8.backward(model(torch.randn(4, 32)).sum())
    optimizer.step()
    assert len(gemms) == 2  # fprop and wgrad of the first layer
    assert fp8.unwrap_model(model).down.weight.isfinite().all()


@pytest.fixture
def no_handler(monkeypatch):
    """As in a script that never imported `FP8Kwargs`."""
    monkeypatch.delitem(sys.modules, "accelerate_fp8.flags", raising=False)


@pytest.mark.usefixtures("fp8", "no_handler")
def test_second_accelerator_of_the_same_run_is_fp8_too(accelerate):
    assert type(accelerate.Accelerator().prepare(Block()).up) is Float8Linear


def test_subclass_with_attributes_of_its_own_is_fp8_too(accelerate):
    class Custom(accelerate.Accelerator):
        def __init__(self):
            self.custom = True
            super().__init__(mixed_precision="fp8", cpu=True)

    assert type(Custom().prepare(Block()).up) is Float8Linear


def test_fp8_kwargs_set_the_configuration(accelerate):
    handlers = [
        FP8Kwargs(FP8Config(recipe="rowwise", skip=("down",))),
        accelerate.utils.DistributedDataParallelKwargs(find_unused_parameters=True),
    ]
    accelerator = accelerate.Accelerator(mixed_precision="fp8", kwargs_handlers=handlers, cpu=True)
    model = accelerator.prepare(Block())
    assert model.up.fp8.recipe.name == "rowwise"
    assert type(model.down) is nn.Linear
    assert accelerator.ddp_handler.find_unused_parameters
    assert len(handlers) == 2  # the caller's list is left alone


@pytest.mark.usefixtures("no_handler")
def test_missing_accelerate_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate.utils", None)
    with pytest.raises(ImportError, match=r"needs accelerate.*pip install accelerate"):
        accelerate_fp8.FP8Kwargs  # noqa: B018


@pytest.mark.parametrize(
    ("variable", "name"),
    [("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"), ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM")],
)
def test_deepspeed_and_megatron_are_refused_by_name(accelerate, monkeypatch, variable, name):
    monkeypatch.setenv(variable, "true")
    with pytest.raises(ValueError, match=rf"{name}.*DDP and under FSDP.*--fp8_backend ao or te"):
        accelerate.Accelerator(mixed_precision="fp8", cpu=True)


@pytest.mark.parametrize("asked", ["true", "false"])
def test_fsdp_that_accelerate_does_not_run_on_a_cpu_is_said(accelerate, monkeypatch, caplog, asked):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", asked)
    with caplog.at_level("INFO"):
        accelerate.Accelerator(mixed_precision="fp8", cpu=True)
    assert caplog.text.count("runs DDP on the CPU (use_cpu: true)") == (asked == "true")


def test_tensor_parallelism_is_refused_before_accelerate_looks_at_it(accelerate):
    pytest.importorskip("transformers")  # whose version Accelerate asks for tensor parallelism
    parallelism = accelerate.ParallelismConfig(tp_size=2)
    with pytest.raises(ValueError, match=r"tensor parallelism yet \(tp_size=2\)"):
        accelerate.Accelerator(mixed_precision="fp8", parallelism_config=parallelism, cpu=True)


@pytest.fixture
def old_card(monkeypatch):
    """A machine with an A100, as far as Accelerate and the engine can see."""
    from accelerate.utils import environment

    def no_nvidia_smi():
        raise FileNotFoundError

    monkeypatch.setattr(environment, "_nvidia_smi", no_nvidia_smi)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA A100-SXM4-40GB")
    environment.check_cuda_fp8_capability.cache_clear()
    yield
    environment.check_cuda_fp8_capability.cache_clear()


@pytest.mark.usefixtures("old_card")
def test_card_without_fp8_is_refused_by_name_and_not_run_in_fp16(accelerate, monkeypatch):
    monkeypatch.setattr(accelerate.Accelerator, "device", torch.device("cuda", 0))
    with pytest.raises(ValueError, match=r"A100-SXM4-40GB \(sm_80\) has no FP8 tensor cores"):
        accelerate.Accelerator(mixed_precision="fp8")


@pytest.mark.usefixtures("old_card")
def test_card_without_fp8_stays_accelerates_matter_for_other_backends(accelerate, monkeypatch):
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "AO")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.mixed_precision == "fp16"


def test_layers_under_a_device_map_hook_run_in_fp8(fp8, gemms):
    model = Block()
    for layer in (model.up, model.down):
        add_hook_to_module(layer, ModelHook())
    preparation_of(fp8).convert(model, None)
    fp8.prepare(model)
    model(torch.randn(4, 32))
    assert len(gemms) == 2


def test_summary_waits_for_the_optimizers_and_comes_once(fp8, caplog):
    caplog.set_level(logging.INFO, logger="accelerate_fp8")
    model = Block()
    fp8.prepare(model, torch.optim.AdamW(model.parameters()))
    fp8.prepare(model)
    fp8.prepare_model(model, evaluation_mode=True)
    messages = [r.getMessage() for r in caplog.records if r.name == "accelerate_fp8"]
    assert len(messages) == 1
    assert "2 of 3 linear layers" in messages[0]
    assert "16.00 bytes per parameter" in messages[0]
    assert "lm_head: skip='lm_head'" in messages[0]


@pytest.mark.parametrize(
    ("own", "root", "messages"),
    [
        (logging.NOTSET, logging.WARNING, 1),
        (logging.WARNING, logging.WARNING, 0),
        (logging.NOTSET, logging.ERROR, 0),
    ],
    ids=["nobody chose", "own level", "root level"],
)
def test_summary_is_visible_unless_silenced(fp8, caplog, own, root, messages):
    logger = logging.getLogger("accelerate_fp8")
    levels = logger.level, logging.root.level
    try:
        logger.setLevel(own)
        logging.root.setLevel(root)
        fp8.prepare(Block())
    finally:
        logger.setLevel(levels[0])
        logging.root.setLevel(levels[1])
    assert len(caplog.records) == messages


def test_what_is_not_applied_is_warned_about(accelerate, monkeypatch, caplog):
    monkeypatch.setenv("ACCELERATE_FP8_MARGIN", "2")
    handlers = [FP8Kwargs(FP8Config(recipe="rowwise"))]
    accelerate.Accelerator(mixed_precision="fp8", kwargs_handlers=handlers, cpu=True)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len([w for w in warnings if "--fp8_margin=2 is not applied" in w]) == 1


def test_free_memory_lets_the_model_go(fp8):
    model = fp8.prepare(Block())
    alive = weakref.ref(model)
    (model,) = fp8.free_memory(model)
    gc.collect()
    assert model is None
    assert alive() is None
