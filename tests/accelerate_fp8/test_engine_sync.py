"""TRL's vLLM is handed the weights of training, adapters and all, and the base never moves."""

import contextlib
import os
import types
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("trl")

from safetensors.torch import load_file
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from tests.accelerate_fp8.test_trl_frozen import lab as lab
from tests.accelerate_fp8.vllm_stub import LLM, Client, Engine, OldRunner, Runner
from tests.fp8_checkpoints import adapted, tiny_llama
from tests.internals import Float8FrozenWeight, engine_sync, rollouts, why_not_folded
from torch_fp8 import FP8Config, convert_to_float8, export, weights_for_engine

LIFE = ["initialize_layerwise_reload", "load_weights", "finalize_layerwise_reload"]
MODES = ["colocate", "server"]


def adapted_in(folder, recipe="blockwise", **options):
    biased = "lora_bias" in options
    plain = tiny_llama(num_hidden_layers=1, attention_bias=biased, mlp_bias=biased)
    plain.save_pretrained(folder)
    options["target_modules"] = ["q_proj", "up_proj"]
    return adapted(plain, FP8Config(recipe=recipe), **options)


def generation_of(model, engine, mode, runner=Runner):
    """TRL's own object, around an engine."""
    made: Any = VLLMGeneration.__new__(VLLMGeneration)
    made.model, made.mode, made.enable_sleep_mode = model, mode, False
    made._weight_metadata = None
    made.accelerator = types.SimpleNamespace(
        is_main_process=True, distributed_type="NO", _fp8_preparation=object()
    )
    whole = contextlib.nullcontext()
    made._dist = types.SimpleNamespace(is_fsdp=False, gather_params=lambda _: whole)
    if mode == "server":
        made.vllm_client = Client(engine)
    else:
        made.llm = LLM(engine, runner)
    return made


@pytest.fixture
def said(monkeypatch):
    texts: list[str] = []
    monkeypatch.setattr(engine_sync, "warn_once", texts.append)
    monkeypatch.setattr(rollouts, "warn_once", texts.append)
    return texts


def test_many_syncs_leave_the_base_bit_identical(tmp_path, said):
    """Merging in place, as TRL does it, changes a quarter of a BF16 base in a thousand."""
    model = adapted_in(tmp_path)
    frozen = [p for p in model.parameters() if isinstance(p, Float8FrozenWeight)]
    assert len(frozen) == 7
    before = [(id(p), p.qdata.clone(), p.scale.clone()) for p in frozen]
    engines = {mode: Engine(tmp_path) for mode in MODES}
    syncs = {mode: generation_of(model, engines[mode], mode) for mode in MODES}
    for i in range(40):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.mul_(1 + (-1) ** i * 2**-7)
        syncs[MODES[i % 2]].sync_weights()
    syncs["colocate"].sync_weights()
    assert [e.syncs for e in engines.values()] == [21, 20]
    assert not any("_iter_named_params" in vars(sync) for sync in syncs.values())
    for parameter, (identity, qdata, scale) in zip(frozen, before, strict=True):
        assert id(parameter) == identity
        assert torch.equal(parameter.qdata.view(torch.uint8), qdata.view(torch.uint8))
        assert torch.equal(parameter.scale, scale)
    for engine in engines.values():
        wanted = dict(weights_for_engine(model))
        assert list(engine.plain) == list(wanted)
        assert all(torch.equal(engine.plain[key], wanted[key]) for key in wanted)
    assert engines["colocate"].calls == [*LIFE, "reset_prefix_cache"] * 21
    update = ["start_weight_update", "finish_weight_update", "reset_prefix_cache"]
    assert engines["server"].calls == update * 20
    assert said == []


@pytest.mark.parametrize(("mode", "peft"), [("colocate", True), ("server", False)])
def test_unmodified_grpo_goes_through_it(lab, said, monkeypatch, mode, peft):
    engine = Engine(Path(lab.folder))
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "VLLMClient", lambda **_: Client(engine))
    monkeypatch.setattr(vllm_generation, "LLM", lambda **_: LLM(engine), raising=False)
    params = types.SimpleNamespace
    monkeypatch.setattr(vllm_generation, "SamplingParams", params, raising=False)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # TRL sets them
        monkeypatch.delenv(name)
    args = {"use_vllm": True, "vllm_mode": mode, "max_completion_length": 8, "logging_steps": 1}
    trainer = lab.make("grpo", peft, args)
    merged: list[str] = []
    if peft:
        tuner = trainer.model.base_model
        monkeypatch.setattr(type(tuner), "merge_adapter", lambda s: merged.append("in"))
    trainer.train()
    assert engine.syncs == 2  # before each step
    assert merged == []
    trainer.vllm_generation.sync_weights()
    wanted = dict(weights_for_engine(trainer.model))
    assert all(torch.equal(engine.plain[key], wanted[key]) for key in wanted)
    rows = [row for row in trainer.state.log_history if "fp8/logprob_difference" in row]
    assert len(rows) == 2
    for row in rows:  # TRL measures the same, where its correction is on
        theirs = row["sampling/sampling_logp_difference/mean"]
        assert row["fp8/logprob_difference"] == pytest.approx(theirs, rel=1e-4)
    # Its chances are those of no model.
    assert "fp8/logprob_multiplicative_error=" in said[0]


@pytest.mark.long
def test_rloo_does_not_ask_vllm_for_log_probabilities(lab, said, monkeypatch):
    engine = Engine(Path(lab.folder))
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "VLLMClient", lambda **_: Client(engine))
    args = {"use_vllm": True, "vllm_mode": "server", "max_completion_length": 8, "max_steps": 1}
    lab.make("rloo", False, args).train()
    assert said == [
        "FP8: fp8/logprob_difference is not measured: the sampler did not return log-probabilities"
    ]


def test_an_engine_without_the_reload_gets_all_parts_at_once(tmp_path, said):
    model = adapted_in(tmp_path)
    for quantization in (None, "fp8_per_block"):
        engine = Engine(tmp_path, quantization)
        generation_of(model, engine, "colocate", OldRunner).sync_weights()
        assert engine.calls == ["load_weights", "reset_prefix_cache"]
        assert engine.syncs == 1
    assert len(said) == 1
    assert "cannot reload layer by layer" in said[0]


def test_scales_that_the_engine_does_not_make_are_told_of(tmp_path, said):
    model = tiny_llama(num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    convert_to_float8(model, FP8Config(recipe="rowwise"))
    engine = Engine(tmp_path, "fp8_per_block")
    generation_of(model, engine, "colocate").sync_weights()
    assert torch.equal(engine.plain["lm_head.weight"], model.lm_head.weight.bfloat16())
    assert len(said) == 1
    assert "'model.layers.0.self_attn.q_proj' is trained with other scales" in said[0]


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}])
def test_adapters_that_do_more_than_add_are_merged_by_trl(tmp_path, said, options):
    model = adapted_in(tmp_path, **options)
    assert why_not_folded(model) is not None
    with pytest.raises(ValueError, match="does more than add to the weight"):
        dict(weights_for_engine(model))
    before = [
        (p.qdata.clone(), p.scale.clone())
        for p in model.parameters()
        if isinstance(p, Float8FrozenWeight)
    ]
    engine = Engine(tmp_path)
    engine.take = lambda weights: set(dict(weights))  # type: ignore[method-assign]
    generation_of(model, engine, "colocate").sync_weights()
    assert len(said) == 1
    assert "TRL merges adapters in place for vLLM and unmerges them later: 'base_model" in said[0]
    after = [p for p in model.parameters() if isinstance(p, Float8FrozenWeight)]
    for parameter, (qdata, scale) in zip(after, before, strict=True):
        assert torch.equal(parameter.qdata.view(torch.uint8), qdata.view(torch.uint8))
        assert torch.equal(parameter.scale, scale)


class FromCheckpoint(Runner):
    config: Any = None

    def __init__(self, engine):
        super().__init__(engine)
        self.model_config.hf_config = types.SimpleNamespace(quantization_config=self.config)


def test_an_engine_of_a_fine_grained_checkpoint_gets_its_tensors(tmp_path, monkeypatch):
    model = adapted_in(tmp_path)
    monkeypatch.setattr(FromCheckpoint, "config", {"weight_block_size": [128, 128]})
    engine, taken = Engine(tmp_path, "fp8"), {}

    def take(weights):
        taken.update({name: weight.clone() for name, weight in weights})
        return set(taken)

    monkeypatch.setattr(engine, "take", take)
    generation_of(model, engine, "colocate", FromCheckpoint).sync_weights()
    assert engine.calls == [*LIFE, "reset_prefix_cache"]
    export(model, tmp_path / "out", adapters="merge")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert taken.keys() == stored.keys()
    for key, value in stored.items():
        assert torch.equal(taken[key].float(), value.float()), key


@pytest.mark.parametrize("quantization", ["compressed-tensors", "modelopt"])
def test_an_engine_of_another_quantized_checkpoint_is_refused(tmp_path, quantization):
    """It would take BF16 values for FP8 codes."""
    engine = Engine(tmp_path, quantization)
    generation = generation_of(adapted_in(tmp_path), engine, "colocate", FromCheckpoint)
    with pytest.raises(ValueError, match=f"vLLM runs with quantization='{quantization}'"):
        generation.sync_weights()
    assert engine.syncs == 0
