import json
import math

import pytest
import torch
from torch import nn

from tests.golden.training import Run, adamw, llama
from tests.internals import FILE_NAME, Float8Layer, read_run
from tests.models import SIZES
from tests.steps import monitored
from torch_fp8 import FP8Config, Monitor, convert_optimizer, convert_to_float8


def _run(config, steps, folder=None, **options):
    model = llama()
    convert_to_float8(model, config)
    optimizer = adamw(model)
    if config.opt_level != "O1":
        convert_optimizer(optimizer, config, model=model)
    monitor, logged = None, {}
    if config.monitor:
        monitor = monitored(model, optimizer, config, logged, folder=folder, **options)
        model.register_forward_hook(lambda m, a, out: monitor.observe_loss(out.loss))
    return model, optimizer, Run(model, optimizer).train(range(1, steps + 1)), monitor, logged


@pytest.mark.long
@pytest.mark.parametrize(
    "recipe", ["tensorwise", pytest.param("delayed", marks=pytest.mark.smoke), "blockwise"]
)
def test_a_run_with_a_monitor_is_bit_for_bit_the_same(recipe, tmp_path):
    config = {"recipe": recipe, "opt_level": "O3"}
    *_, without, _, _ = _run(FP8Config(**config), 6)
    probes = ("clip_search", "logit_sharpness")
    watched = FP8Config(**config, monitor=2, monitor_probes=probes)
    model, _, with_monitor, monitor, logged = _run(watched, 6, tmp_path)
    assert with_monitor == without
    assert sorted(logged) == [2, 4, 6]
    assert set(logged[4]) == {*monitor.series.names, "fp8/alarm", "fp8/loss"}
    assert all(math.isfinite(value) for value in logged[6].values() if value == value)
    layers = [m for m in model.modules() if isinstance(m, Float8Layer)]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in layers)
    assert not any(m.fp8.observer for m in layers)


def test_a_measured_step_of_a_compiled_model_runs_eagerly_and_is_seen():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    config = FP8Config(recipe="tensorwise", opt_level="O1", monitor=2)
    convert_to_float8(model, config)
    compiled = torch.compile(model, backend="eager")
    optimizer, logged, said = torch.optim.SGD(model.parameters(), lr=0.1), {}, []
    log = {"log": lambda series, step: logged.update({step: series}), "say": said.append}
    monitor = Monitor(model, [optimizer], config, **log)
    for _ in range(6):
        compiled(torch.randn(16, 64)).sum().backward()
        optimizer.step()
    assert "fp8/0/input/amax" not in logged[2]
    assert "compiled" in said[0]
    assert len(said) == 1
    assert logged[4]["fp8/0/input/amax"] > 1
    assert "fp8/2/grad_output/sqnr" in logged[6]
    monitor.close()


@pytest.mark.filterwarnings("ignore:FP8 monitor, step")
def test_what_graphs_cast_beyond_the_last_steps_scales_is_an_alarm_once():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    options = {"recipe": "tensorwise", "opt_level": "O1", "graph_scales": "last_step"}
    config = FP8Config(**options, monitor=4)
    convert_to_float8(model, config)
    compiled = torch.compile(model, backend="aot_eager")
    optimizer, logged = torch.optim.SGD(model.parameters(), lr=1e-4), {}
    log = {"log": lambda series, step: logged.update({step: series})}
    monitor = Monitor(model, [optimizer], config, **log)
    for step in range(1, 13):
        x = torch.randn(16, 64) * (1000 if step == 5 else 1)
        compiled(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    saturated = {step: series["fp8/graphs/saturated"] for step, series in logged.items()}
    assert saturated[4] == saturated[12] == 0
    assert saturated[8] >= 1
    alarms = [event for event in monitor.events if "fp8/graphs/saturated" in event["what"]]
    assert [(event["event"], event["step"]) for event in alarms] == [("alarm", 8)]
    monitor.close()


@pytest.mark.parametrize("whole", [True, False])
def test_a_graph_that_is_built_in_a_measured_step_has_no_hooks_in_it(whole):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    config = FP8Config(recipe="tensorwise", opt_level="O1", monitor=1)
    convert_to_float8(model, config)
    optimizer, logged = torch.optim.SGD(model.parameters(), lr=0.1), {}
    compiled = torch.compile(model, backend="eager") if whole else model
    if not whole:
        model[0].compile(backend="eager")
    monitor = Monitor(
        model, [optimizer], config, log=lambda series, step: logged.update({step: series})
    )
    for _ in range(3):
        compiled(torch.randn(16, 64)).sum().backward()
        optimizer.step()
    monitor.close()
    assert ("fp8/0/input/amax" in logged[1]) is not whole
    assert {"fp8/0/input/amax", "fp8/2/grad_output/sqnr"} <= logged[3].keys()
    graph = compiled(torch.randn(16, 64))  # built anew if hooks had been traced
    assert graph.shape == (16, 64)


def test_frozen_layers_and_adapters_are_measured_as_far_as_they_go():
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    model[0].requires_grad_(False)
    config = FP8Config(recipe="tensorwise", frozen_weights="fp8", monitor=1)
    convert_to_float8(model, config)
    optimizer = torch.optim.AdamW(model[1].parameters(), lr=1e-3)
    logged = {}
    monitor = Monitor(model, [optimizer], config, log=lambda series, step: logged.update(series))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(16, 128)).sum().backward()
    optimizer.step()
    assert "fp8/0/input/amax" in logged
    assert not any(name.startswith(("fp8/0/weight", "fp8/0/update")) for name in logged)
    assert {"fp8/1/weight/amax", "fp8/1/input/sqnr"} <= logged.keys()
    monitor.close()


def test_the_file_is_read_again_with_a_last_line_cut_off(tmp_path):
    config = FP8Config(recipe="tensorwise", monitor=2)
    *_, monitor, logged = _run(config, 5, tmp_path)
    monitor.close()
    record = read_run(tmp_path)
    assert record.steps == [2, 4]
    assert sorted(record.losses) == [1, 2, 3, 4, 5]
    assert record.notes == []
    name = "fp8/model.layers.0.mlp.down_proj/input/sqnr"
    assert record.values[name][4] == pytest.approx(logged[4][name], rel=1e-4)
    whole = (tmp_path / FILE_NAME).read_text()
    (tmp_path / FILE_NAME).write_text(whole[:-5])
    cut = read_run(tmp_path)
    assert "cut off" in cut.notes[0]
    assert cut.steps == [2, 4]
    assert sorted(cut.losses) == [1, 2, 3, 4]
    *_, monitor, _ = _run(config, 2, tmp_path)  # a run from its first step on, in the same folder
    again = read_run(tmp_path)
    assert again.steps == [2]
    assert "begins with an earlier run" in again.notes[0]
    header = json.loads(whole.splitlines()[0])
    header["version"] = 99
    (tmp_path / FILE_NAME).write_text("\n".join([json.dumps(header), *whole.splitlines()[1:]]))
    assert "version 99" in read_run(tmp_path).notes[0]
    (tmp_path / FILE_NAME).unlink()
    with pytest.raises(FileNotFoundError, match="holds no statistics"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "name", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3Text", "Phi3"]
)
def test_gated_mlps_of_transformers_are_smoothed_and_watched(name):
    import transformers

    sizes = SIZES | {"vocab_size": 32, "intermediate_size": 96, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 16}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{name}Config")(**sizes, **tokens)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    mlp = model.model.layers[1].mlp
    halves = mlp.gate_up_proj.weight.chunk(2) if name == "Phi3" else None
    gate, up = halves or (mlp.gate_proj.weight, mlp.up_proj.weight)
    with torch.no_grad():
        up[7] = gate[7]
    options = FP8Config(recipe="delayed", opt_level="O1", smooth_swiglu=True, monitor=1)
    report = convert_to_float8(model, options)
    mlps = [f"model.layers.{i}.mlp" for i in range(2)]
    assert report.smooth == tuple(f"{mlp}.down_proj" for mlp in mlps)
    optimizer, logged = torch.optim.SGD(model.parameters(), lr=1e-3), {}
    Monitor(model, [optimizer], options, log=lambda series, step: logged.update(series))
    ids = torch.arange(3, 19)[None]
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    first, second = (logged[f"fp8/{mlp}/swiglu/alignment"] for mlp in mlps)
    assert 0 < first < 0.9
    assert second == pytest.approx(1, abs=0.01)
    for mlp in mlps:
        assert logged[f"fp8/{mlp}.down_proj/input/sqnr"] > 29
