import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.internals import expected_bytes_per_param, kept_payloads
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, memory_report
from torch_fp8.ops import one_rank

NUMEL = 2 * 128 * 192
PAYLOADS = NUMEL + 2 * 4  # with a scale each
LATER = 4 * (NUMEL + 128 + 192)
NEEDED = 8 * PAYLOADS + LATER


@pytest.fixture
def free(monkeypatch):
    def set_free(num_bytes):
        monkeypatch.setattr(kept_payloads, "free_bytes", lambda device: num_bytes)

    return set_free


def _converted(**options):
    torch.manual_seed(0)
    config = FP8Config(**{"recipe": "tensorwise", **options})
    model = nn.Sequential(nn.Linear(128, 192), nn.GELU(), nn.Linear(192, 128))
    convert_to_float8(model, config)
    frozen = nn.Parameter(torch.ones(99), requires_grad=False)
    optimizer = torch.optim.AdamW([*model.parameters(), frozen], lr=1e-2)
    return model, optimizer, convert_optimizer(optimizer, config, model=model)


def _trained(**options):
    model, optimizer, _ = _converted(**options)
    for seed in range(4):
        x = torch.randn(8, 128, generator=torch.Generator().manual_seed(seed))
        with torch.autocast("cpu", torch.bfloat16):
            model(x).float().square().mean().backward()
        if seed % 2:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def test_nothing_is_kept_on_the_cpu():
    model, optimizer, report = _converted()
    assert report.num_cached == 0
    assert "cached" not in str(report)
    assert "caches" not in expected_bytes_per_param(model, [optimizer])


@pytest.mark.parametrize(("less", "kept"), [(0, 2), (1, 0)])
def test_payloads_are_kept_if_activations_have_eight_times_their_bytes(free, less, kept):
    free(NEEDED - less)
    model, optimizer, report = _converted()
    assert report.num_cached == kept
    assert ("2 cached weight payloads" in str(report)) == bool(kept)
    assert ("caches 0.99" in expected_bytes_per_param(model, [optimizer])) == bool(kept)
    assert (memory_report(model, optimizer).caches >= PAYLOADS) == bool(kept)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_the_bits_are_the_same_either_way(free, recipe):
    cast = _trained(recipe=recipe)
    free(1 << 40)
    assert all(map(torch.equal, cast, _trained(recipe=recipe)))
    assert all(map(torch.equal, cast, _trained(recipe=recipe, cache_weights=True)))
    assert all(map(torch.equal, cast, _trained(recipe=recipe, cache_weights=False)))


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"recipe": "rowwise"}, 0),  # it serves forward alone
        ({"recipe": "delayed"}, 2),  # inputs and gradients alone have delayed scales
        ({"cache_weights": False}, 0),
        ({"opt_level": "O1"}, 0),
        ({"recipe": "rowwise", "cache_weights": True}, 2),
    ],
    ids=str,
)
def test_what_is_kept_where_there_is_memory(free, options, kept):
    free(1 << 40)
    assert _converted(**options)[2].num_cached == kept


def test_a_decision_stays(free):
    free(NEEDED)
    model, optimizer, _ = _converted()
    memory = [t.data_ptr() for p in model.parameters() if p.ndim > 1 for t in p.halves.kept]
    table = model[0].weight.halves.table
    config = FP8Config(recipe="tensorwise")
    free(0)
    for again in (config, dataclasses.replace(config, seed=1)):
        assert convert_optimizer(optimizer, again, model=model).num_cached == 2
    kept = [t.data_ptr() for p in model.parameters() if p.ndim > 1 for t in p.halves.payload[:2]]
    assert set(kept) <= set(memory)
    assert model[0].weight.halves.table is table
    without = dataclasses.replace(config, cache_weights=False)
    assert convert_optimizer(optimizer, without, model=model).num_cached == 0
    assert memory_report(model).caches == 8  # amaxes
    optimizer.param_groups[0]["params"] = list(model[0].parameters())
    again = dataclasses.replace(config, cache_weights=True)
    assert convert_optimizer(optimizer, again, model=model).num_cached == 1


@pytest.mark.parametrize("first", [0, NEEDED])
def test_ranks_take_the_answer_of_the_first(free, first, monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(one_rank, "default_store", lambda: store)
    monkeypatch.setattr(one_rank, "in_several_ranks", lambda: True)
    monkeypatch.setattr(kept_payloads, "can_ask", lambda: True)
    reports = []
    for num_bytes in (first, NEEDED - first):
        free(num_bytes)
        reports.append(_converted()[2].num_cached)
    assert reports == [2 if first else 0] * 2


def _scales(model):
    return [p.halves.payload.scale for p in model.parameters() if p.ndim > 1]


def test_the_scales_of_a_block_are_rows_of_one_table(free):
    free(NEEDED)
    model, optimizer, _ = _converted()
    first, second = _scales(model)
    assert second.data_ptr() - first.data_ptr() == 16
    with torch.no_grad():
        model[0].weight.mul_(2)
    (table,) = {p.halves.table for p in model.parameters() if p.ndim > 1}
    for p in (model[0].weight, model[2].weight):
        amax = p.halves.high.float().abs().amax()
        assert p.halves.current_payload(p.halves.cast).scale == amax / 448
    assert torch.equal(table.scales[:, 0], torch.stack([first, second]))
    before = first.clone()
    model(torch.ones(2, 128)).sum().backward()
    optimizer.step()
    assert not torch.equal(first, before)
    assert model[0].weight.halves.payload.scale is first


def test_copies_and_moved_weights_have_scales_of_their_own(free):
    free(NEEDED)
    model, _, _ = _converted()
    for p in (model[0].weight, model[2].weight):
        p.halves.current_payload(p.halves.cast)
    before, copied = torch.stack(_scales(model)), copy.deepcopy(model)
    with torch.no_grad():
        copied[0].weight.mul_(4)
    copied[0].weight.halves.current_payload(copied[0].weight.halves.cast)
    assert torch.equal(torch.stack(_scales(model)), before)
    assert copied[0].weight.halves.table is None
    other = torch.optim.AdamW(copied.parameters())
    convert_optimizer(other, FP8Config(recipe="tensorwise"), model=copied)
    first, second = _scales(copied)
    assert second.data_ptr() - first.data_ptr() == 16
    model.to("meta")
    model.to_empty(device="cpu")
    first, second = _scales(model)
    assert second.data_ptr() - first.data_ptr() == 16
