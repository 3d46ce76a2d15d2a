import dataclasses
import itertools
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from tests.internals import (
    CATEGORIES,
    LEVELS,
    Layers,
    StepBytes,
    advice,
    cli,
    layouts,
    left_of,
    make_setup,
    plain_text,
    run_step,
    standing_bytes,
    step_bytes,
    unpadded_rows,
)
from tests.internals import plan_steps as steps
from tests.saved_activations import count_saved
from tests.torch_fp8_tools.plan.layouts_for_tests import LAYOUTS, config_of, plan_beside, trained
from torch_fp8 import FP8Config, convert_to_float8, memory_report, plan

PAGES = Path(__file__).resolve().parents[3] / "docs"
SMALL = {"sequence": 32, "recipe": "tensorwise"}


@pytest.fixture(scope="module")
def whole():
    return plan(config_of("llama"), **SMALL)


def standing(config, level, **degrees):
    return standing_bytes(make_setup(config, **SMALL, **degrees), level)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("level", LEVELS)
def test_predicted_bytes_are_those_of_a_trained_model(layout, level):
    config = FP8Config(recipe="tensorwise", opt_level=level) if level.startswith("O") else None
    predicted = standing(config_of(layout), level)
    model, optimizer = trained(layout, config)
    assert dataclasses.asdict(predicted) == dataclasses.asdict(memory_report(model, optimizer))


def test_no_layer_is_left_out_that_shares_weights_with_others():
    sizes = config_of("llama", 3).to_dict()
    sizes = {name: sizes[name] for name in ("vocab_size", "hidden_size", "num_attention_heads")}
    kinds = {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"]}
    layers = Layers(AutoConfig.for_model("zamba2", **sizes, **kinds))
    assert layers.shortest(range(3), sharded=False)[0] == [0, 1, 2]


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "level", "gpus", "checkpointing"),
    [
        *itertools.product(["llama"], ["bf16-mixed"], [1, 4], [False, True]),
        ("llama", "O2", 4, False),
        ("llama", "O2", 4, True),
        ("qwen3_moe", "O2", 4, True),
        ("gemma3_text", "O2", 4, True),
        ("gpt_oss", "bf16-mixed", 1, True),
        ("bamba", "O2", 1, False),  # its configuration computes the kinds of its layers
    ],
)
def test_the_step_is_that_of_the_whole_model(layout, level, gpus, checkpointing):
    setup = make_setup(config_of(layout, 9), **SMALL, gpus=gpus, checkpointing=checkpointing)
    few, _ = setup.layers.shortest(range(9), sharded=gpus > 1)
    assert len(few) == {"llama": 3, "qwen3_moe": 6}.get(layout, 5)
    step = step_bytes(setup, level)
    whole = run_step(setup, level, range(9)).with_layers(range(9))
    assert step.saved == pytest.approx(whole.saved, rel=2e-3)  # scales of tensors
    assert step == dataclasses.replace(whole, saved=step.saved)


@pytest.mark.parametrize("layout", ["llama", "gemma3_text", "bart"])
@pytest.mark.parametrize("level", ["bf16-mixed", "O1"])
def test_a_step_saves_what_an_eager_run_saves(layout, level):
    """It has no causal mask, not even of Bart's own padding mask; Gemma's of windows it has."""
    config = config_of("llama" if layout == "bart" else layout)
    if layout == "bart":
        sizes = {"encoder_layers": 2, "decoder_layers": 2, "d_model": 64, "decoder_ffn_dim": 144}
        config = AutoConfig.for_model("bart", vocab_size=96, decoder_attention_heads=4, **sizes)
    config.sliding_window = 16
    parts = run_step(make_setup(config, **SMALL), level, range(2)).parts
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    if level == "O1":
        convert_to_float8(model, FP8Config(recipe="tensorwise", opt_level="O1"))
    tokens = torch.ones(1, 32, dtype=torch.int64)
    there = [*model.parameters(), *model.buffers()]
    with count_saved(there) as saved, torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    assert loss.isfinite()
    counted = sum(part.saved for part in parts[:3])
    assert saved.total == pytest.approx(counted, abs=50)  # scales of tensors


def test_masks_of_another_transformers_are_counted_as_it_makes_them(monkeypatch):
    monkeypatch.setattr(transformers, "masking_utils", None)
    with unpadded_rows():
        pass


@pytest.mark.parametrize(("level", "gpus"), [("bf16-mixed", 1), ("O2", 4)])
def test_a_step_is_counted_in_one_run_of_three_layers(level, gpus, monkeypatch):
    """Many runs of layers, at about 0.4 s each, made a plan take 42 s of processor time."""
    runs = []
    monkeypatch.setattr(steps, "run_step", lambda *args: runs.append(args[-1]) or run_step(*args))
    plan(config_of("llama", 6), **SMALL, gpus=gpus, levels=(level,))
    assert [len(layers) for layers in runs] == [3]


@pytest.mark.long
def test_total_is_the_sum_and_the_peak_is_below(whole):
    for level in whole.levels.values():
        parts = [level.bytes[name] for name in (*CATEGORIES, "activations")]
        assert level.bytes["total"] == sum(parts)
        assert 0 < level.peak <= level.bytes["total"]
        assert level.fits
    bf16, o3 = whole.levels["bf16-mixed"], whole.levels["O3"]
    assert o3.bytes["moments"] < 0.4 * bf16.bytes["moments"]
    kept = plan(config_of("llama"), **SMALL, accumulate=2, levels=("O2",)).levels["O2"]
    assert kept.peak == kept.bytes["total"]


@pytest.mark.long
def test_lora_holds_frozen_weights_at_a_byte():
    config = config_of("llama")
    config.hidden_size, config.intermediate_size, config.head_dim = 256, 512, 64
    # Steps hold nothing of what is counted here; that of O2 is run all the same.
    idle = {"bf16-mixed": StepBytes(*[0.0] * 5)}
    levels = ("bf16-mixed", "O2")
    planned = plan_beside(idle, config, **SMALL, levels=levels, method="lora", rank=2)
    assert planned.num_params == sum(p.numel() for p in layouts.build(config).parameters())
    lora = planned.levels
    assert lora["O2"].bytes["weights"] < 0.6 * lora["bf16-mixed"].bytes["weights"]
    assert lora["O2"].bytes["moments"] < 0.15 * lora["O2"].bytes["weights"]


@pytest.mark.long
def test_tensor_parallelism_shares_the_weights():
    config = config_of("llama")
    config.num_key_value_heads = 2
    planned = plan(config, **SMALL, levels=("O2",), gpus=2, tensor=2)
    assert planned.levels["O2"].bytes["weights"] < 0.75 * standing(config, "O2").weights


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 3, "tensor": 2}, "do not divide the 3 GPUs"),
        ({"gpus": 4, "fsdp": 3}, "are 3 GPUs, but gpus=4"),
        ({"tensor": 8, "gpus": 8}, "does not divide the 4 attention heads"),
        ({"pipeline": 2, "gpus": 2}, "pipeline is no longer planned: plan the layers of one stage"),
        ({"card": "h10"}, "did you mean 'h100'?"),
        ({"recipe": "int4"}, "valid choices are 'auto'"),
        ({"method": "dpo"}, "'full', 'lora'"),
        ({"method": "rlhf"}, "is no longer planned: plan each trained model"),
        ({"gpus": 0}, "at least 1"),
        ({"memory": 0}, "above 0 GiB"),
        ({"levels": ("O4",)}, "levels='O4' is unknown"),
        ({"recipe": "mxfp8"}, "h100 (sm_90) cannot run block_1x32 GEMMs. It runs tensorwise"),
        ({"card": "b200", "recipe": "blockwise"}, "b200 (sm_100) cannot run block_1x128 GEMMs"),
        ({"card": "rtx-4090", "recipe": "blockwise"}, "(sm_89) cannot run block_1x128"),
        ({"card": "A100"}, "A100 (sm_80) has no FP8 tensor cores: they come with sm_89"),
        ({"sequence": 10**6}, "sequence=1000000 is longer than the model's"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        plan(config_of("llama"), **{"sequence": 32, **options})


def test_an_unknown_option_is_a_type_error_that_names_the_nearest():
    with pytest.raises(TypeError, match=r"plan\(\) option\(s\) 'gpu'; .*did you mean 'gpus'\?"):
        plan(config_of("llama"), gpu=8)


def test_models_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"did you mean 'llama-3\.1-8b'"):
        plan("Llama3.1-8B")
    with pytest.raises(ValueError, match="neither a preset, nor a folder"):
        plan(str(tmp_path))
    for text, message in (
        ("{", "not the configuration of a Hugging Face model"),
        ('{"model_type": "llama"}', "has no hidden_size"),
        ('{"model_type": "lama", "hidden_size": 64}', "lama"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            plan(str(tmp_path))
    with pytest.raises(TypeError, match="name of a preset"):
        plan(3)


def test_presets_have_the_sizes_of_their_names():
    others = {"qwen3-30b-a3b": 30.5, "mixtral-8x7b": 46.7}
    for name in layouts.PRESETS:
        billions = others.get(name) or float(name.rpartition("-")[2].removesuffix("b"))
        model = layouts.build(layouts.read_config(name.upper()))
        count = sum(p.numel() for p in model.parameters()) / 1e9
        assert count == pytest.approx(billions, rel=0.25), name


def test_a_card_takes_more_than_the_counted_peak():
    """docs/results.md: of 80 GiB 79.2 are there, and 52.9 as counted are 55 to 59 on a card."""
    gib = 2**30
    assert left_of(80 * gib, 0) < 79.2 * gib
    asked = 79.2 * gib - left_of(80 * gib, 52.9 * gib)
    assert 55 * gib < asked < 59 * gib
    for page, text in (("results.md", "asks for 58.1"), ("planning.md", "asks for 58.1")):
        assert text in (PAGES / page).read_text()
    assert round(asked / gib, 1) == 58.1


@pytest.mark.long
def test_plain_text_stays_within_80_columns(whole):
    of_auto = plain_text(plan(config_of("llama"), sequence=32, levels=("O1",)))
    text = plain_text(whole)
    assert max(map(len, (of_auto + text).splitlines())) <= 80
    config = re.search(r"TORCH_FP8_CONFIG='(.*)'", text).group(1)
    assert FP8Config(**json.loads(config)).opt_level in LEVELS


@pytest.mark.parametrize(
    ("peaks", "advised"),
    [
        ({"O1": 3, "O2": 2, "O3": 1}, ("O2", "the default, and it fits")),
        ({"O1": 3, "O3": 1}, ("O3", "of the levels that fit, the one with the lowest peak")),
        ({}, ("", "")),
    ],
)
def test_the_default_is_advised_or_the_lowest_peak(peaks, advised):
    levels = {
        name: SimpleNamespace(
            config="{}" * (name != "BF16"), fits=name in peaks, peak=peaks.get(name)
        )
        for name in ("BF16", "O1", "O2", "O3")
    }
    assert advice(SimpleNamespace(levels=levels)) == advised


@pytest.mark.long
def test_command_prints_json_and_names_mistakes(tmp_path, capsys):
    config_of("llama").save_pretrained(tmp_path)
    call = ["plan", str(tmp_path), "--sequence", "32", "--json", "--level", "bf16-mixed"]
    assert cli.main([*call, "O3"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed["levels"]) == ["bf16-mixed", "O3"]
    level = printed["levels"]["O3"]
    assert {*CATEGORIES, "activations", "total"} == set(level["bytes"])
    assert level["fits"] is True
    assert level["wire"] == 0
    assert cli.main([*call, "--memory", "0.001"]) == 1
    capsys.readouterr()
    assert cli.main(["plan", "no-such-model"]) == 2
    assert "neither a preset" in capsys.readouterr().err


def test_what_does_not_fit_names_ways_out(monkeypatch, capsys):
    made = SimpleNamespace(fits=False, __str__=None)
    monkeypatch.setattr(sys.modules["torch_fp8_tools.plan.plan"], "plan", lambda *_, **__: made)
    assert cli.main(["plan", "llama-3.1-8b"]) == 1
    capsys.readouterr()
    step = {"O2": StepBytes(*[2.0**40] * 5)}
    planned = plan_beside(step, config_of("llama"), levels=("O2",), **SMALL)
    assert "Nothing fits: more GPUs, --checkpointing, --tensor, or a" in str(planned)


def test_a_process_group_of_ones_own_is_left_alone(single_process_group):
    with pytest.raises(ValueError, match="in another process"):
        plan(config_of("llama"), **SMALL, gpus=2)
