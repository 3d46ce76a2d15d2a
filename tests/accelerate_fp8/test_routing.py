import copy

import pytest
import torch
from torch import nn

from accelerate_fp8 import record_routing, routing_replay
from tests.internals import expert_weights, find_routers
from tests.moe_models import MODELS, moe_model
from torch_fp8 import FP8Config, Monitor, convert_to_float8

BATCH, LENGTH = 2, 12
ROUTERS = sorted(MODELS)


@pytest.fixture(params=ROUTERS)
def model(request):
    torch.manual_seed(0)
    model = moe_model(request.param)
    for parameter in model.parameters():
        if parameter.ndim == 3:
            nn.init.normal_(parameter, std=0.1)
    for router in find_routers(model):
        nn.init.normal_(router.module.weight, std=0.5)
    return model.train()


def _ids(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 64, (BATCH, LENGTH), generator=generator)


def _perturbed(model):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for router in find_routers(other):
            router.module.weight.add_(torch.randn_like(router.module.weight))
    return other


def _selections(model, ids, backward=False):
    """Return what reaches each module of experts: the experts of each token, sorted."""
    taken, handles = {}, []

    def look(name, module, args):
        if len(args) > 1:
            taken[name] = args[1].sort(1).values
        else:  # Llama-4: each expert gets the tokens that chose it, and zeros
            count = module.gate_up_proj.shape[0]
            chosen = args[0].view(count, BATCH * LENGTH, -1).any(-1).t()  # (T, E)
            taken[name] = chosen.nonzero()[:, 1:].view(BATCH * LENGTH, -1)

    for name, module in model.named_modules():
        if any(True for _ in expert_weights(name, module)):
            handles.append(
                module.register_forward_pre_hook(lambda m, args, name=name: look(name, m, args))
            )
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    if backward:
        loss.backward()
    for handle in handles:
        handle.remove()
    return list(taken.values())


def test_recorded_choices_are_those_that_reach_the_experts(model):
    with record_routing(model) as record:
        taken = _selections(model, _ids())
    indices = record.indices(BATCH)
    top_k = taken[0].shape[1]
    assert indices.shape == (BATCH, LENGTH, len(taken), top_k)
    for i, experts in enumerate(taken):
        assert torch.equal(indices[:, :, i].reshape(-1, top_k).sort(1).values, experts)
    before = len(record.choices[find_routers(model)[0].name])
    model(input_ids=_ids())
    assert len(record.choices[find_routers(model)[0].name]) == before


@pytest.mark.parametrize("fp8", [False, True])
def test_replayed_experts_are_taken_and_router_weights_learn(model, fp8):
    with record_routing(model) as record:
        want = _selections(model, _ids())
    other = _perturbed(model)
    if fp8:
        convert_to_float8(other, FP8Config(recipe="rowwise", opt_level="O1"))
    own = _selections(other, _ids())
    assert not all(map(torch.equal, own, want))
    with routing_replay(other, record.indices(BATCH)):
        got = _selections(other, _ids(), backward=True)
    assert all(map(torch.equal, got, want))
    for router in find_routers(other):
        assert router.module.weight.grad.abs().sum() > 0
    assert all(map(torch.equal, _selections(other, _ids()), own))  # it has ended


def test_replaying_a_models_own_choices_changes_no_bit(model):
    def run(indices=None):
        model.zero_grad()
        if indices is None:
            loss = model(input_ids=_ids(), labels=_ids()).loss
            loss.backward()
        else:
            with routing_replay(model, indices) as replay:
                loss = model(input_ids=_ids(), labels=_ids()).loss
                loss.backward()
            assert replay.share() == 0
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    with record_routing(model) as record:
        want = run()
    assert all(map(torch.equal, want, run(record.indices(BATCH))))


def test_the_share_of_differing_decisions_is_a_hand_count(model):
    with record_routing(model) as record:
        model(input_ids=_ids())
    other = _perturbed(model)
    indices = record.indices(BATCH)
    indices[0, :5] = -1  # padding on the left
    first = find_routers(other)[0].name
    with routing_replay(other, indices) as replay, record_routing(other):
        other(input_ids=_ids())
    with record_routing(other) as record:
        other(input_ids=_ids())
    # The first router sees the same hidden states in both runs: its own choices are known.
    own = record.choices[first][0]
    given = indices[:, :, 0].reshape(own.shape)
    count = total = 0
    for token in range(len(own)):
        if (given[token] >= 0).all():
            count += len(set(own[token].tolist()) - set(given[token].tolist()))
            total += own.shape[1]
    assert total == (BATCH * LENGTH - 5) * own.shape[1]
    assert 0 < count < total
    assert replay.share(first) == pytest.approx(count / total)
    assert int(replay.decisions[first]) == total


def test_padding_is_left_to_the_router(model):
    other = _perturbed(model)
    own = _selections(other, _ids())
    top_k = own[0].shape[1]
    nothing = torch.full((BATCH, LENGTH, len(own), top_k), -1)
    with routing_replay(other, nothing) as replay:
        assert all(map(torch.equal, _selections(other, _ids()), own))
    assert replay.share() == 0
    some = nothing.clone()
    some[1, 3:] = torch.arange(top_k)
    with routing_replay(other, some):
        got = _selections(other, _ids())
    rows = BATCH * LENGTH - LENGTH + 3
    assert torch.equal(got[0][:rows], own[0][:rows])
    assert torch.equal(got[0][rows:], torch.arange(top_k).expand(LENGTH - 3, -1))


@pytest.mark.parametrize("missing", [0, -1])
def test_a_token_whose_experts_are_given_in_part_is_left_to_the_router(model, missing):
    other = _perturbed(model)
    own = _selections(other, _ids())
    top_k = own[0].shape[1]
    part = torch.arange(top_k).repeat(BATCH, LENGTH, len(own), 1)
    part[..., missing] = -1
    with routing_replay(other, part) as replay:
        assert all(map(torch.equal, _selections(other, _ids()), own))
    assert not any(map(int, replay.decisions.values()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_take_them_in_both_passes(model, reentrant):
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with record_routing(model) as record, torch.no_grad():
        want = _selections(model, _ids())
    other = _perturbed(model)

    def gradients():
        other.zero_grad()
        with routing_replay(other, record.indices(BATCH)) as replay:
            got = _selections(other, _ids(), backward=True)
        assert all(map(torch.equal, got, want))
        assert int(sum(replay.decisions.values())) == BATCH * LENGTH * len(got) * got[0].shape[1]
        return [p.grad.clone() for p in other.parameters() if p.grad is not None]

    checkpointed = gradients()
    other.gradient_checkpointing_disable()
    assert all(map(torch.equal, gradients(), checkpointed))


def test_a_backward_behind_the_end_is_an_error_under_checkpoints(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with record_routing(model) as record:
        model(input_ids=_ids())
    with routing_replay(model, record.indices(BATCH)):
        loss = model(input_ids=_ids(), labels=_ids()).loss
    with pytest.raises(RuntimeError, match="run backward within"):
        loss.backward()
    model(input_ids=_ids(), labels=_ids()).loss.backward()  # and nothing of it is left


def test_generation_is_recorded_token_by_token():
    torch.manual_seed(0)
    model = moe_model("Qwen3Moe").eval()
    with record_routing(model) as record:
        ids = model.generate(_ids(), max_new_tokens=4, do_sample=False)
    indices = record.indices(BATCH)  # no router has seen the last token
    assert indices.shape[:2] == (BATCH, ids.shape[1] - 1)
    with record_routing(model) as whole:
        model(input_ids=ids[:, :-1])
    assert torch.equal(indices.sort(-1).values, whole.indices(BATCH).sort(-1).values)


def test_peft_and_wrappers_are_seen_through():
    peft = pytest.importorskip("peft")
    model = moe_model("Qwen3Moe")
    names = [router.name for router in find_routers(model)]
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_parameters=targets, r=8))
    convert_to_float8(adapted)
    assert [router.name.partition("base_model.model.")[2] for router in find_routers(adapted)] == (
        names
    )


def test_bad_input_is_named():
    model, ids = moe_model("Qwen3Moe"), _ids()
    with record_routing(model) as record:
        model(input_ids=ids)
    indices = record.indices(BATCH)
    with (
        pytest.raises(ValueError, match=r"'model.layers.0.mlp.gate', .* \(24, 2\)"),
        routing_replay(model, indices[:, 1:]),
    ):
        model(input_ids=ids)
    with pytest.raises(ValueError, match="2 routers, k"), routing_replay(model, indices[:, :, :1]):
        pass
    with (
        pytest.raises(ValueError, match="experts, but got index 4"),
        routing_replay(model, indices * 0 + 4),
    ):
        pass
    with pytest.raises(TypeError, match="takes integers"), routing_replay(model, indices * 1.0):
        pass
    with (
        pytest.raises(ValueError, match="'gate' is not a router of this model"),
        routing_replay(model, {"gate": indices[:, :, 0]}),
    ):
        pass
    with pytest.raises(ValueError, match="no fused experts"), record_routing(nn.Linear(4, 4)):
        pass
    model(input_ids=ids)  # nothing of it is left


def test_a_router_that_is_not_known_is_named():
    class Sinkhorn(nn.Module):
        def __init__(self, router):
            super().__init__()
            self.weight = router.weight

        def forward(self, x):
            logits = x.reshape(-1, x.shape[-1]) @ self.weight.t()
            order = logits.sort(1, descending=True).indices[:, :2]
            return logits, logits.gather(1, order).softmax(1), order

    model = moe_model("Qwen3Moe")
    mlp = model.model.layers[1].mlp
    mlp.gate = Sinkhorn(mlp.gate)
    with (
        pytest.raises(ValueError, match=r"'model.layers.1.mlp.gate' \(Sinkhorn\) chooses"),
        record_routing(model),
    ):
        model(input_ids=_ids())
    del mlp.gate
    mlp.route = nn.Identity()
    with pytest.raises(ValueError, match=r"no router beside 'model.layers.1.mlp.experts' \(Qwen3"):
        find_routers(model)


@pytest.mark.filterwarnings("ignore:FP8 monitor, step")
def test_the_monitor_logs_the_share():
    torch.manual_seed(0)
    model, logged = moe_model("Qwen3Moe"), {}
    for router in find_routers(model):
        nn.init.normal_(router.module.weight, std=0.5)
    config = FP8Config(recipe="rowwise", opt_level="O1", monitor=2)
    convert_to_float8(model, config)
    with record_routing(model) as record, torch.no_grad():
        model(input_ids=_ids())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    monitor = Monitor(model, [optimizer], config, log=lambda s, step: logged.update({step: s}))
    shares = []
    for step in range(4):
        indices = record.indices(BATCH)
        if step == 1:
            indices = (indices + 1) % 4
        if step < 2:
            with routing_replay(model, indices) as replay:
                model(input_ids=_ids(), labels=_ids()).loss.backward()
            shares.append(replay.share("model.layers.0.mlp.gate"))
        else:
            model(input_ids=_ids(), labels=_ids()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    name = "fp8/model.layers.0.mlp.experts/routing/differing"
    assert shares[1] > shares[0]
    assert logged[2][name] == pytest.approx(sum(shares) / 2)
    assert name not in logged[4]
    monitor.close()
