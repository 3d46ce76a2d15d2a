"""A first moment in 4 bits: which weights have it, writes, checkpoints, bytes."""

import copy
import io
import itertools

import pytest
import torch
from torch import nn

from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, memory_report
from torch_fp8.conversion.memory import expected_bytes_per_param
from torch_fp8.ops.adamw import adamw_step_reference
from torch_fp8.quantization import ratio_int4
from torch_fp8.quantization.block_scaled import encode as encode_8_bits
from torch_fp8.quantization.formats import MOMENT2
from torch_fp8.quantization.linear_int8 import threshold_keys, turned_words
from torch_fp8.quantization.stochastic_rounding import element_index
from torch_fp8.tensor.float8_moment import Float8Moment
from torch_fp8.tensor.ratio_moment import RatioMoment
from torch_fp8_tools.commands.stock_states import convert_optimizer_file


class Model(nn.Module):
    """Each kind of parameter: those of FP8 layers, an embedding, a head, odd rows, a small one."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.up, self.odd = nn.Linear(64, 144), nn.Linear(144, 152, bias=False)
        self.down, self.small = nn.Linear(152, 64), nn.Linear(64, 32)
        self.lm_head = nn.Linear(64, 128, bias=False)

    def forward(self, tokens):
        x = self.down(self.odd(self.up(self.embedding(tokens)).relu()).relu())
        return self.lm_head(x + self.small(x).repeat(1, 1, 2))


def new_training(config, **options):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    convert_to_float8(model, config)
    return model, optimizer, convert_optimizer(optimizer, config, model=model)


def train(model, optimizer, steps):
    for step in steps:
        tokens = torch.arange(64).view(4, 16).roll(step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def moments(optimizer, parameter):
    state = optimizer.state[parameter]
    return state["exp_avg"], state["exp_avg_sq"]


def in_4_bits(model, optimizer):
    return {
        name
        for name, p in model.named_parameters()
        if isinstance(optimizer.state[p]["exp_avg"], RatioMoment)
    }


FOUR = FP8Config(moment_bits=4)


def test_weights_of_fp8_layers_have_it_and_nothing_else():
    model, optimizer, report = new_training(FOUR)
    train(model, optimizer, range(2))
    assert in_4_bits(model, optimizer) == {"up.weight", "odd.weight"}
    assert "a first moment in 4 bits for 2 weights of FP8 layers" in str(report)
    assert "both moments of 1 weight (down.weight) have 8 bits" in str(report)
    # 152 is no multiple of 16, the small one has 2,048 elements
    assert isinstance(optimizer.state[model.down.weight]["exp_avg"], Float8Moment)
    assert optimizer.state[model.small.weight]["exp_avg"].__class__ is torch.Tensor


@pytest.mark.parametrize("betas", [(0.95, 0.999), (0.5, 0.999), (0.9, 0.99999)])
def test_betas_that_are_too_coarse_keep_8_bits(betas):
    model, optimizer, report = new_training(FOUR, betas=betas)
    train(model, optimizer, range(2))
    assert not in_4_bits(model, optimizer)
    assert f"both moments have 8 bits with betas {betas}" in str(report)
    assert "a first moment in 4 bits for 0 weights" in str(report)
    other, eight, _ = new_training(FP8Config())
    pairs = (model, [optimizer]), (other, [eight])
    assert len({expected_bytes_per_param(*pair) for pair in pairs}) == 1


def test_betas_may_change_in_mid_training():
    """As OneCycleLR changes them."""
    model, optimizer, _ = new_training(FOUR)
    train(model, optimizer, range(2))
    for betas, names in (((0.95, 0.999), set()), ((0.85, 0.999), {"up.weight", "odd.weight"})):
        optimizer.param_groups[0]["betas"] = betas
        before = optimizer.state[model.up.weight]["exp_avg"].clone()
        train(model, optimizer, range(2, 3))
        assert in_4_bits(model, optimizer) == names
        first, second = moments(optimizer, model.up.weight)
        assert second.first is (first if names else None)
        after = optimizer.state[model.up.weight]["exp_avg"].clone()
        assert torch.nn.functional.cosine_similarity(before, after, dim=-1).mean() > 0.7


@pytest.mark.long
def test_training_is_as_with_8_bits():
    losses = []
    for bits in (8, 4):
        model, optimizer, _ = new_training(FP8Config(moment_bits=bits), betas=(0.9, 0.95))
        losses.append(train(model, optimizer, range(40)))
    assert losses[1] == pytest.approx(losses[0], rel=0.03)


def test_thresholds_turn_with_each_step(monkeypatch):
    model, optimizer, _ = new_training(FOUR)
    seen = []

    def reference(matrix, scalars, multiplier=None):
        if isinstance(matrix.exp_avg, ratio_int4.RatioInt4):
            seen.append((scalars.first_keys, scalars.first_turn))
        adamw_step_reference(matrix, scalars, multiplier)

    monkeypatch.setattr("torch_fp8.optim.step.adamw_step_reference", reference)
    train(model, optimizer, range(2))
    assert seen == [threshold_keys(0, step, index) for step in (1, 2) for index in (1, 3)]


@pytest.mark.long
def test_levels_and_release_take_it():
    losses = {}
    for name, options in {
        "O2": {},
        "released": {"gradient_release": True},
        "O3": {"opt_level": "O3"},
        "4-bit residual": {"residual_bits": 4},
        "clipped": {"update_clipping": True},
        "cached": {"cache_weights": True},
        "unsplit": {"split_weights": False},
    }.items():
        model, optimizer, _ = new_training(FP8Config(moment_bits=4, **options))
        losses[name] = train(model, optimizer, range(6))
        assert in_4_bits(model, optimizer) == {"up.weight", "odd.weight"}, name
    assert losses["released"] == losses["O2"]
    assert max(losses.values()) - min(losses.values()) < 0.02 * losses["O2"]


# ---- what others write and read ------------------------------------------------------------------


def write(moment, kind, value):
    if kind == "copy_":
        moment.copy_(value)
    elif kind == "data":
        moment.data = value
    else:
        moment.view(-1)[:] = value.view(-1)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first, second", "second, first"])
@pytest.mark.parametrize("kind", ["copy_", "data", "view"])
def test_moments_may_be_written_in_any_order(kind, order):
    model, optimizer, _ = new_training(FOUR)
    train(model, optimizer, range(3))
    both = moments(optimizer, model.up.weight)
    wanted = [both[0].clone() * 3 + 1e-4, both[1].clone() * 1e4]
    for i in order:
        write(both[i], kind, wanted[i])
    assert torch.equal(both[0].clone(), wanted[0])
    torch.testing.assert_close(both[1].clone(), wanted[1], rtol=0.07, atol=0)
    train(model, optimizer, range(3, 4))
    first, second = moments(optimizer, model.up.weight)
    assert first.is_beside(second)
    assert not first.written
    expected = 0.9 * wanted[0]
    assert torch.nn.functional.cosine_similarity(first.clone(), expected, dim=-1).min() > 0.9


def test_a_write_to_one_moment_leaves_the_other():
    model, optimizer, _ = new_training(FOUR)
    train(model, optimizer, range(2))
    first, second = moments(optimizer, model.up.weight)
    before = first.clone(), second.clone()
    second.mul_(0.25)
    assert torch.equal(first.clone(), before[0])
    second.zero_()
    assert torch.equal(first.clone(), before[0])
    alias = first.detach()
    first.mul_(2)
    assert torch.equal(alias.clone(), before[0] * 2)
    assert torch.equal(second.clone(), torch.zeros_like(before[1]))


def test_states_may_leave_the_device_and_return_or_be_plain():
    model, optimizer, _ = new_training(FOUR)
    other, again, _ = new_training(FOUR)
    train(model, optimizer, range(2))
    train(other, again, range(2))
    for p, state in again.state.items():
        for name, value in state.items():
            state[name] = copy.deepcopy(value)
        if p is other.odd.weight:
            state["exp_avg"], state["exp_avg_sq"] = state["exp_avg"].clone(), state["exp_avg_sq"]
    train(model, optimizer, range(2, 4))
    train(other, again, range(2, 4))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_copy_of_the_optimizer_goes_on_by_itself():
    model, optimizer, _ = new_training(FOUR)
    train(model, optimizer, range(2))
    other, again = copy.deepcopy((model, optimizer))
    for each in ((model, optimizer), (other, again)):
        train(*each, range(2, 4))
        assert in_4_bits(*each) == {"up.weight", "odd.weight"}
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    new = nn.Linear(64, 64)
    again.add_param_group({"params": new.parameters()})
    train(other, again, range(4, 5))


# ---- checkpoints ---------------------------------------------------------------------------------


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("bits", [4, 8], ids=lambda bits: f"into {bits} bits")
@pytest.mark.parametrize("states", ["float32", "fp8"])
def test_a_run_goes_on_bit_for_bit(states, bits):
    config = FP8Config(moment_bits=4, checkpoint_states=states)
    model, optimizer, _ = new_training(config)
    train(model, optimizer, range(3))
    other, resumed, _ = new_training(FP8Config(moment_bits=bits))
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict({**new_training(FOUR)[1].state_dict(), "state": {}})
    assert not resumed.state  # as stock: no entries of parameters that were not stepped
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        for saved, loaded in zip(moments(optimizer, p), moments(resumed, q), strict=True):
            same = saved.clone() if bits == 4 else in_8_bits(saved, loaded)
            assert torch.equal(same, loaded.clone())
    if bits == 4:
        train(model, optimizer, range(3, 6))
        train(other, resumed, range(3, 6))
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)


def in_8_bits(saved, loaded):
    """The value of a moment as it is where it is loaded."""
    if not isinstance(loaded, Float8Moment):
        return saved.clone()
    target = Float8Moment.zeros(loaded.clone(), loaded.format)
    target.store(saved.clone())
    return target.clone()


def test_8_bits_become_4_and_stock_reads_either(tmp_path):
    model, optimizer, _ = new_training(FP8Config(checkpoint_states="fp8"))
    train(model, optimizer, range(3))
    other, resumed, _ = new_training(FP8Config(moment_bits=4, checkpoint_states="fp8"))
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    train(other, resumed, range(3, 5))
    assert in_4_bits(other, resumed) == {"up.weight", "odd.weight"}
    source, target = tmp_path / "ours.pt", tmp_path / "stock.pt"
    torch.save(resumed.state_dict(), source)
    convert_optimizer_file(source, target)
    stock_model = Model()
    stock = torch.optim.AdamW(stock_model.parameters())
    stock.load_state_dict(torch.load(target, weights_only=True))
    for p, q in zip(stock_model.parameters(), other.parameters(), strict=True):
        for mine, theirs in zip(moments(stock, p), moments(resumed, q), strict=True):
            assert torch.equal(mine, theirs.clone())


def test_a_checkpoint_has_the_bytes_of_memory_and_a_written_moment_in_full():
    config = FP8Config(moment_bits=4, checkpoint_states="fp8")
    model, optimizer, _ = new_training(config)
    train(model, optimizer, range(2))
    entry = optimizer.state_dict()["state"][1]  # of up.weight, (144, 64)
    assert entry["exp_avg_ratio_codes"].shape == (144, 32)
    assert entry["exp_avg_ratio_scale"].shape == (144, 8)
    optimizer.state[model.up.weight]["exp_avg"].mul_(2)
    entry = optimizer.state_dict()["state"][1]
    assert torch.equal(entry["exp_avg"], optimizer.state[model.up.weight]["exp_avg"].clone())
    assert "exp_avg_ratio_codes" not in entry


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("exp_avg_ratio_scale"), "'exp_avg_ratio_scale'] is not a uint8 tensor"),
        (
            lambda s: s.update(exp_avg_ratio_codes=s["exp_avg_ratio_codes"][:, :-1]),
            r"has shape \(144, 31\), expected \(144, 32\)",
        ),
        (
            lambda s: (
                [s.pop(f"exp_avg_sq_{part}") for part in ("codes", "scale")]
                and s.update(exp_avg_sq=torch.zeros(144, 64))
            ),
            "a ratio to 'exp_avg_sq_codes', which are missing",
        ),
    ],
)
def test_a_broken_checkpoint_is_refused_whole(change, message):
    config = FP8Config(moment_bits=4, checkpoint_states="fp8")
    model, optimizer, _ = new_training(config)
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    change(state["state"][1])
    before = moments(optimizer, model.odd.weight)[0].clone()
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert torch.equal(moments(optimizer, model.odd.weight)[0].clone(), before)


# ---- bytes, arguments ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 6.7),
        ({"opt_level": "O3"}, 5.73),
        ({"gradient_release": True}, 4.67),
        ({"gradient_release": True, "residual_bits": 4}, 4.17),
    ],
)
def test_bytes_of_a_layer(options, most):
    config = FP8Config(moment_bits=4, **options)
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    convert_to_float8(model, config)
    optimizer = torch.optim.AdamW(model.parameters())
    convert_optimizer(optimizer, config, model=model)
    expected = memory_report(model, optimizer)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(8, 256)).float().square().mean().backward()
    optimizer.step()
    report = memory_report(model, optimizer)
    assert most - 0.07 < report.bytes_per_param <= most
    assert expected.num_params == report.num_params


def test_mistakes_are_named():
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(
        ValueError, match="moment_bits=4 applies to the weights of FP8 layers: pass"
    ):
        convert_optimizer(optimizer, FOUR)
    with pytest.raises(ValueError, match="excludes moment_bits"):
        FP8Config(moment_bits=4, opt_level="O1")
    with pytest.raises(ValueError, match="moment_bits"):
        FP8Config(moment_bits=6)
    sgd = torch.optim.SGD(model.parameters(), momentum=0.9, lr=0.1)
    convert_to_float8(model, FOUR)
    report = convert_optimizer(sgd, FOUR, model=model)
    assert "moment_bits is for Adam and AdamW" in str(report)


# ---- the format ----------------------------------------------------------------------------------


def stored(m, v, step):
    second = encode_8_bits(v, MOMENT2)
    index = element_index(*m.shape, 0, 0, m.shape[1], m.device)
    return ratio_int4.encode(m, second, turned_words(index, *threshold_keys(0, step, 0))), second


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("sparsity", [0.0, 0.7, 0.97])
def test_what_was_read_is_stored_again_as_it_was(spread, sparsity):
    generator = torch.Generator().manual_seed(0)
    v = torch.exp(4 * torch.randn(256, 64, generator=generator) - 20)
    m = v.sqrt() * torch.randn(256, 64, generator=generator) * spread
    m *= torch.rand(256, 64, generator=generator) >= sparsity
    for step in range(3):
        codes, second = stored(m, v, step)
        value = ratio_int4.decode(codes)
        assert torch.equal(ratio_int4.decode(ratio_int4.encode(value, second)), value)


def test_the_mean_over_steps_is_what_came_in():
    generator = torch.Generator().manual_seed(0)
    v = torch.rand(64, 64, generator=generator) + 0.1
    m = v.sqrt() * torch.randn(64, 64, generator=generator)
    values = [ratio_int4.decode(stored(m, v, step)[0]) for step in range(64)]
    error = (torch.stack(values).mean(0) - m).abs() / v.sqrt()
    assert error.max() < 0.03  # a step of the grid is 0.2 to 0.5


def test_nan_infinity_and_zero():
    v, m = torch.ones(4, 32), torch.ones(4, 32)
    m[0, 3], m[1, 4], v[2, 5], v[3] = torch.nan, torch.inf, torch.nan, 0.0
    value = ratio_int4.decode(stored(m, v, 0)[0])
    assert value[0].isnan().tolist() == [i == 3 for i in range(32)]
    assert value[1].isnan().tolist() == [i == 4 for i in range(32)]
    assert value[2].isnan().all()
    assert torch.equal(value[3], torch.zeros(32))


def test_no_ratio_of_adam_exceeds_the_format():
    limit = 7 * (2 - 2.0**-5)
    for beta1, beta2 in itertools.product((0.5, 0.8, 0.9), (0.9, 0.95, 0.99, 0.999, 0.9999)):
        # The gradients that make the largest ratio grow by beta2 / beta1.
        m = v = 0.0
        for step in range(4000):
            g = (beta2 / beta1) ** (step - 4000)
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        assert ratio_int4.holds(beta1, beta2) == (m / v**0.5 <= limit)
    assert not ratio_int4.holds(0.0, 0.999)
    assert ratio_int4.holds(0.0, 0.9)
    assert not ratio_int4.holds(0.9, 1.0)
    assert not ratio_int4.holds(0.95, 0.95)  # it would fit, and is too coarse
