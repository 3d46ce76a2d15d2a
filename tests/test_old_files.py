"""Files that the release 0.1.0 wrote load, or are refused whole if they hold 4-bit values.

They are in `tests/data/v0.1.0`; the script that wrote them is `write.py` there, in commit 459afaff.
``pickled_optimizers.pt`` (commit 1eeb94f9) has models and optimizers with ``moment_bits=4`` and
``residual_bits`` 0 and 4.
"""

import dataclasses
import io
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.internals import REMOVED, convert_optimizer_file
from tests.steps import adamw
from torch_fp8 import FP8Config, convert_optimizer, load_trainable, merged_state_dict

FOLDER = Path(__file__).parent / "data" / "v0.1.0"
FIELDS = {field.name: field.default for field in dataclasses.fields(FP8Config)}
EXACT = ("o2", "o3_fp8", "residuals_4", "residuals_0", "bf16_residuals_0")
"""Files whose weights and moments are as they were saved; other moments are rounded to 8 bits."""
MOMENTS = r"FP8Config\(moment_bits=4\) of torch-fp8 0.1.0.*save the states with checkpoint_states="
RESIDUALS = r"FP8Config\(residual_bits=4\) of torch-fp8 0.1.0.*save torch_fp8.merged_state_dict"


def read(name):
    file = torch.load(FOLDER / f"{name}.pt", weights_only=False)
    return file["saved"], file["values"]


def training(name="", **options):
    """A model with other weights, converted with today's defaults, and AdamW, which has stepped."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    model.to(torch.bfloat16 if name.startswith("bf16") else torch.float32)
    level = "O3" if name.startswith("o3") else "O2"
    config = FP8Config(recipe="tensorwise", opt_level=level, **options)
    optimizer, _ = adamw(model, config, lr=1e-2)
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(3))
    with torch.autocast("cpu", torch.bfloat16):
        model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def rows_of(model, optimizer):
    found = {f"weight {name}": w for name, w in merged_state_dict(model, optimizer).items()}
    for name, parameter in model.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            found[f"{moment} {name}"] = optimizer.state[parameter][moment]
    return {name: value.detach().float()[:8] + 0.0 for name, value in found.items()}


def assert_moments_close(loaded, values):
    """Assert that first moments are those of `values` up to a rounding, and all else is equal."""
    assert loaded.keys() == values.keys()
    for key, value in values.items():
        if key.startswith("exp_avg "):
            tolerance = 0.01 * value.abs().max()
            torch.testing.assert_close(loaded[key], value, rtol=0.0625, atol=tolerance)
        else:
            assert torch.equal(loaded[key], value), key


@pytest.mark.parametrize("name", [*EXACT, "moments_4"])
def test_states_of_models_and_optimizers_load(name):
    saved, values = read(name)
    model, optimizer = training(name)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    loaded = rows_of(model, optimizer)
    if name in EXACT:
        assert loaded.keys() == values.keys()
        assert all(torch.equal(loaded[key], value) for key, value in values.items())
    else:
        assert_moments_close(loaded, values)
    step(model, optimizer)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("moments_4_fp8", r"'exp_avg_ratio': 'int4'.*save the states with checkpoint_states="),
        ("bf16_residuals_4", RESIDUALS),
    ],
)
def test_states_of_4_bits_are_refused_whole_by_name(tmp_path, name, message):
    saved, _ = read(name)
    model, optimizer = training(name)
    before = rows_of(model, optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved["optimizer"])
    if name == "moments_4_fp8":
        torch.save(saved["optimizer"], tmp_path / "ours.pt")
        with pytest.raises(ValueError, match="'exp_avg_ratio': 'int4'"):
            convert_optimizer_file(tmp_path / "ours.pt", tmp_path / "stock.pt")
        del saved["optimizer"]["torch_fp8"]
        with pytest.raises(ValueError, match=MOMENTS):
            optimizer.load_state_dict(saved["optimizer"])
    loaded = rows_of(model, optimizer)
    assert all(torch.equal(loaded[key], value) for key, value in before.items())
    step(model, optimizer)


def test_pickles_of_4_bits_are_refused():
    with pytest.raises(ValueError, match=RESIDUALS):
        torch.load(FOLDER / "pickled_optimizers.pt", weights_only=False)


def state_of(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def set_state(model, optimizer, state):
    parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(model, optimizer, **parts)


def test_a_folder_of_distributed_checkpoint_loads():
    model, optimizer = training()
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=FOLDER / "dcp")
    set_state(model, optimizer, state)
    loaded = rows_of(model, optimizer)
    for key, value in read("dcp_values")[1].items():
        assert torch.equal(loaded[key], value), key


@pytest.mark.parametrize("checkpoint_states", ["float32", "fp8"])
def test_a_folder_with_moments_in_4_bits_is_refused(tmp_path, checkpoint_states):
    """torch itself refuses the folder, whole, and we refuse the file that it becomes."""
    model, optimizer = training(checkpoint_states=checkpoint_states)
    state, before = state_of(model, optimizer), rows_of(model, optimizer)
    with pytest.raises(dcp.api.CheckpointException, match=r"Missing key .*\.0\.weight\.exp_avg"):
        dcp.load(state, checkpoint_id=FOLDER / "dcp_moments_4")
    set_state(model, optimizer, state)
    assert_moments_close(rows_of(model, optimizer), before)
    dcp_to_torch_save(FOLDER / "dcp_moments_4", tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match=MOMENTS):
        set_state(model, optimizer, torch.load(tmp_path / "checkpoint.pt", weights_only=False))
    step(model, optimizer)


@pytest.mark.parametrize("name", ["model", "model_residuals_4"])
def test_pickled_models_load_and_train(name):
    saved, values = read(name)
    model = torch.load(io.BytesIO(saved), weights_only=False)
    optimizer = torch.optim.AdamW(model.parameters())
    loaded = merged_state_dict(model, optimizer)
    for key, value in values.items():
        rows = loaded[key.removeprefix("weight ")].detach()[:8] + 0.0
        assert torch.equal(rows, value), key
    convert_optimizer(optimizer, FP8Config(recipe="tensorwise"), model=model)
    step(model, optimizer)


def test_pickled_configurations_drop_removed_options_with_a_warning():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        configs, options = read("configs")
    messages = [str(warning.message) for warning in caught if "0.1.0" in str(warning.message)]
    removed = {name for of in options.values() for name in of if name not in FIELDS}
    assert len(messages) == len(removed)
    for name in removed:
        assert any(f"{name!r}" in message for message in messages)
    for name, config in configs.items():
        kept = {key: value for key, value in options[name].items() if key in FIELDS}
        assert config == FP8Config(**{"cache_weights": False, **kept})  # the default then
        assert vars(config).keys() == FIELDS.keys()
        assert FP8Config.from_json(config.to_json()) == config


def test_an_option_that_is_gone_returns_to_its_default(monkeypatch):
    config = FP8Config(recipe="rowwise", seed=7)
    stored = {**vars(config), "gone": 4, "save_attention": "bf16"}
    monkeypatch.setitem(REMOVED, "gone", "take seed")
    loaded = FP8Config.__new__(FP8Config)
    with pytest.warns(UserWarning, match="pickled has 'gone': 4, which is ignored: take seed"):
        loaded.__setstate__(stored)
    assert loaded == config
    assert vars(loaded).keys() == FIELDS.keys()


def test_exported_checkpoints_load():
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = FOLDER / "exported"
    sizes = LlamaConfig.from_pretrained(folder)
    model = load_trainable(lambda: LlamaForCausalLM(sizes), folder, FP8Config(recipe="rowwise"))
    for name, value in read("exported_values")[1].items():
        rows = model.get_parameter(name).detach()[:8].float()
        scale = value.abs().amax(-1, keepdim=True) if value.ndim > 1 else value.abs().max()
        assert ((rows - value).abs() <= 0.0626 * value.abs() + 0.002 * scale).all(), name
