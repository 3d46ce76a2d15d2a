import copy
import pickle

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.internals import expected_memory, halves_module
from tests.internals import grouped_linear_function as grouped
from tests.moe_experts import LAYOUTS, E, batch, experts
from tests.steps import adamw
from torch_fp8 import (
    FP8Config,
    convert_optimizer,
    convert_to_float8,
    freeze,
    memory_report,
    rollout,
)


def _experts(layout):
    torch.manual_seed(0)
    return experts(layout)


def _forward(module, seed=0):
    torch.manual_seed(seed)
    x, index, scores = batch(40)
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        if hasattr(module, "has_gate"):
            return module(x, index, scores)
        return module(x.repeat(E, 1))


def _trained(layout, **options):
    module = _experts(layout)
    optimizer, _ = adamw(module, FP8Config(recipe="rowwise", **options), lr=1e-3)
    return module, optimizer


@pytest.fixture
def casts(monkeypatch):
    flips, stock = [], halves_module.quantize_stacked

    def quantize_stacked(values, *more):
        flips.append(not values.is_contiguous())
        return stock(values, *more)

    for module in (grouped, halves_module):
        monkeypatch.setattr(module, "quantize_stacked", quantize_stacked)
    return flips


def _steps(layout, casts, **options):
    """Return the weights after two steps of three micro-batches, and the casts of each step."""
    module, optimizer = _trained(layout, **options)
    counts = []
    for step in range(2):
        casts.clear()
        for micro in range(3):
            _forward(module, 10 * step + micro).float().square().mean().backward()
        counts.append(len(casts))
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone().float() for p in module.parameters()], counts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kept_payloads_are_the_same_bits_and_cast_once_a_step(layout, casts):
    plain, counts = _steps(layout, casts)
    assert counts == [12, 12]  # two weights, forward and backward, three micro-batches
    values, counts = _steps(layout, casts, cache_weights=True)
    assert counts == [2 + 6, 6]  # backward's are others; the step casts forward's
    assert all(map(torch.equal, values, plain))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_are_those_that_are_expected(layout):
    module, optimizer = _trained(layout, cache_weights=True)
    expected = expected_memory(module, [optimizer])
    _forward(module).float().square().mean().backward()
    optimizer.step()
    _forward(module).float().square().mean().backward()
    report = memory_report(module, optimizer)
    assert report.caches == expected.caches > 0
    numel = sum(p.numel() for p in module.parameters() if p.ndim == 3)
    assert report.caches < numel * 1.1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_write_to_a_weight_is_seen(layout, casts):
    module, _ = _trained(layout, cache_weights=True)
    before = _forward(module).detach()
    with torch.no_grad():
        getattr(module, module.fp8_weight_names[1]).neg_()
    casts.clear()
    after = _forward(module).detach()
    assert len(casts) == 1
    assert not torch.equal(after, before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_evaluation_casts_a_trained_weight_once(layout, casts):
    module, _ = _trained(layout)
    module.eval()
    with torch.no_grad():
        first = _forward(module)
        assert len(casts) == 2
        assert torch.equal(_forward(module), first)
    assert len(casts) == 2
    for free in (module.train, lambda: _forward(module)):  # with gradients
        assert memory_report(module).caches > 0
        free()
        assert memory_report(module).caches == 0
        with torch.no_grad():
            _forward(module.eval())
    module, _ = _trained(layout, keep_eval_weights=False)
    module.eval()
    with torch.no_grad():
        _forward(module), _forward(module)
    assert memory_report(module).caches == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_keeps_nothing_in_the_first_pass_of_a_checkpoint(layout):
    module, _ = _trained(layout)
    with torch.no_grad():  # as a reentrant one runs it
        _forward(module)
    assert memory_report(module).caches == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rollout_casts_any_weight_once(layout, casts):
    module = _experts(layout)
    convert_to_float8(module, FP8Config(recipe="rowwise", opt_level="O1"))
    with torch.no_grad():
        want = _forward(module)
        _forward(module)
        assert len(casts) == 4  # anybody may have written to a plain Parameter
        casts.clear()
        with rollout(module), rollout(module):
            assert torch.equal(_forward(module), want)
            _forward(module)
        assert len(casts) == 2
        assert memory_report(module).caches == 0
        getattr(module, module.fp8_weight_names[0]).zero_()
        with rollout(module):
            assert not torch.equal(_forward(module), want)


def test_plain_weights_keep_nothing_in_training():
    module = _experts("plain").bfloat16()
    config = FP8Config(recipe="rowwise", cache_weights=True)
    convert_to_float8(module, config)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    with pytest.warns(UserWarning, match="caches nothing"):
        convert_optimizer(optimizer, config, model=module)
    _forward(module).float().sum().backward()
    assert memory_report(module).caches == 0


def test_files_and_frozen_weights_keep_nothing_and_copies_their_own():
    module, _ = _trained("plain", cache_weights=True)
    _forward(module).float().sum().backward()
    assert not memory_report(pickle.loads(pickle.dumps(module))).caches
    twin, kept = copy.deepcopy(module), memory_report(module).caches
    assert memory_report(twin).caches == kept
    with torch.no_grad():
        twin.down_proj.neg_()
    assert not torch.equal(_forward(twin), _forward(module))
    module.to("cpu")
    assert memory_report(module).caches == kept
    frozen = _experts("plain").requires_grad_(False)
    convert_to_float8(frozen, FP8Config(recipe="rowwise"))
    freeze(frozen)
    with torch.no_grad():
        _forward(frozen)
    assert not memory_report(frozen).caches


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_a_compiled_block_runs_under_ddp():
    module, _ = _trained("plain")
    compiled = torch.compile(DistributedDataParallel(module), backend="aot_eager")
    assert torch.equal(_forward_compiled(compiled), _forward(module).detach())


def _forward_compiled(compiled):
    torch.manual_seed(0)
    x, index, scores = batch(40)
    with torch.autocast("cpu", torch.bfloat16):
        return compiled(x.requires_grad_(), index, scores).detach()
