"""What a host has dequantized is told apart from what was trained since, layer by layer."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.fp8_checkpoints import FINE_GRAINED, compressed, exact, write
from tests.internals import adopt_checkpoints, known_bytes, residual_of, take_over
from torch_fp8 import FP8Config


class _Config:
    def __init__(self, path):
        self.name_or_path = str(path)


class _Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj = nn.Linear(128, 256, bias=False)
        self.down_proj = nn.Linear(256, 128, bias=False)


class _Hosts(nn.Module):
    """A model as a host makes it: the path it came from stands in its configuration."""

    base_model_prefix = "model"

    def __init__(self, path):
        super().__init__()
        self.model = _Inner()
        self.lm_head = nn.Linear(128, 64, bias=False)
        self.config = _Config(path)


def _loaded(folder, quantization=FINE_GRAINED, suffix="_scale_inv", blocks=None):
    """A checkpoint, and the model whose weights were dequantized to BF16 from it."""
    model = _Hosts(folder)
    state = {k: v.bfloat16() for k, v in model.state_dict().items()}
    fp8 = write(folder, state, {"quantization_config": quantization}, suffix, blocks=blocks)
    state |= {key: exact(*of).float().bfloat16() for key, of in fp8.items()}
    model.bfloat16().load_state_dict(state)
    return model, fp8


@pytest.mark.parametrize(
    "layout",
    [(), (compressed("tensor"), "_scale", tuple)],
    ids=["fine-grained", "tensor"],
)
def test_frozen_weights_keep_the_very_bytes(tmp_path, layout):
    model, fp8 = _loaded(tmp_path, *layout)
    model.requires_grad_(False)
    (report,) = adopt_checkpoints(model, FP8Config())
    assert (report.num_exact, report.num_frozen, report.num_changed) == (0, 2, 0)
    for name, (qdata, scale, block) in fp8.items():
        found = known_bytes(model.get_parameter(name))
        assert found.qdata.view(torch.uint8).equal(qdata.view(torch.uint8))
        assert torch.equal(found.scale.flatten(), scale.flatten())
        assert found.block == block
    assert known_bytes(model.model.up_proj.weight) is None  # taken
    assert known_bytes(model.lm_head.weight) is None


def test_bytes_in_other_blocks_than_those_of_frozen_weights_are_not_kept(tmp_path):
    model, _ = _loaded(tmp_path, compressed("channel"), "_scale", lambda shape: (1, shape[1]))
    model.requires_grad_(False)
    assert adopt_checkpoints(model, FP8Config()) == []
    assert known_bytes(model.model.up_proj.weight) is None


def test_a_frozen_weight_that_is_written_later_has_no_known_bytes(tmp_path):
    model, _ = _loaded(tmp_path)
    model.requires_grad_(False)
    adopt_checkpoints(model, FP8Config())
    model.model.up_proj.weight.data.mul_(1.02)
    assert known_bytes(model.model.up_proj.weight) is None
    assert known_bytes(model.model.down_proj.weight) is not None


def test_each_weight_is_judged_by_itself(tmp_path):
    model, _ = _loaded(tmp_path)
    model.model.up_proj.requires_grad_(False)
    (report,) = adopt_checkpoints(model, FP8Config())
    assert (report.num_exact, report.num_frozen, report.num_changed) == (1, 1, 0)
    assert residual_of(model.model.down_proj.weight) is not None
    assert residual_of(model.model.up_proj.weight) is None


def test_a_part_of_the_checkpoint_is_found_without_its_prefix(tmp_path):
    model, _ = _loaded(tmp_path)
    inner = model.model
    inner.base_model_prefix, inner.config = "model", model.config
    (report,) = adopt_checkpoints(inner, FP8Config())
    assert report.num_exact == 2


def test_adapters_and_compiled_wrappers_hide_no_weight(tmp_path):
    model, fp8 = _loaded(tmp_path)
    wrapper = nn.Module()
    wrapper.base_layer = model.model.up_proj
    model.model.up_proj = wrapper
    model.model._modules["_orig_mod"] = nn.ModuleDict({"down_proj": model.model.down_proj})
    del model.model.down_proj
    model.requires_grad_(False)
    outer = nn.Sequential(model)  # which, as PEFT's, passes its model's attributes on
    outer.config, outer.base_model_prefix = model.config, model.base_model_prefix
    (report,) = adopt_checkpoints(outer, FP8Config())
    assert report.num_frozen == len(fp8) == 2


def test_level_o1_makes_no_residuals(tmp_path):
    model, _ = _loaded(tmp_path)
    assert adopt_checkpoints(model, FP8Config(opt_level="O1")) == []
    assert residual_of(model.model.down_proj.weight) is None


def test_weights_that_the_host_has_fused_are_counted(tmp_path):
    model, fp8 = _loaded(tmp_path)
    state = model.state_dict()
    experts = {f"model.experts.{i}.up_proj.weight": torch.randn(128, 128) for i in range(3)}
    written = write(tmp_path, state | experts, {"quantization_config": FINE_GRAINED})
    of_files = {key: exact(*written[key]).float().bfloat16() for key in fp8}
    model.load_state_dict(state | of_files)
    (report,) = adopt_checkpoints(model, FP8Config())
    assert (report.num_exact, report.num_fused) == (2, 3)
    assert "3 weights are fused (experts) and keep the values the host loaded" in str(report)


def test_a_trained_model_is_nobodys_checkpoint(tmp_path):
    model, _ = _loaded(tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    assert take_over(model, FP8Config()) == []


def test_before_sharding_nothing_waits_and_a_line_says_so(tmp_path):
    model, _ = _loaded(tmp_path)
    (line,) = take_over(model, FP8Config(), sharded=True)
    assert "for sharded weights (FSDP2, tensor parallelism)" in line
    assert residual_of(model.model.down_proj.weight) is None


@pytest.mark.parametrize("trained", [True, False])
def test_a_model_that_is_sharded_already_has_a_line_too(tmp_path, single_process_group, trained):
    model, _ = _loaded(tmp_path)
    fully_shard(model)
    (line,) = take_over(model, FP8Config(), trained=trained)
    assert "frozen ones are quantized again" in line
    assert "the bits below BF16 are lost" in line
    assert take_over(model, FP8Config(opt_level="O1"), trained=trained) == []


def _no_quantization(folder):
    (folder / "config.json").write_text("{}")


def _another(folder):
    config = {"quantization_config": {"quant_method": "awq"}}
    (folder / "config.json").write_text(json.dumps(config))


def _moved(folder):
    folder.rename(folder.with_name("elsewhere"))


def _pickled(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("changes", [_no_quantization, _another, _moved, _pickled])
def test_what_is_no_fp8_checkpoint_on_this_machine_is_left_alone(tmp_path, changes):
    folder = tmp_path / "checkpoint"
    model, _ = _loaded(folder)
    changes(folder)
    assert take_over(model, FP8Config()) == []


def test_models_of_the_hub_are_found_in_its_cache(tmp_path, monkeypatch):
    import huggingface_hub

    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    model, _ = _loaded(snapshot)
    model.config.name_or_path, model.config._commit_hash = "org/name", "abc"
    found = huggingface_hub.try_to_load_from_cache
    monkeypatch.setattr(
        huggingface_hub,
        "try_to_load_from_cache",
        lambda *args, **kwargs: found(*args, cache_dir=tmp_path, **kwargs),
    )
    (report,) = adopt_checkpoints(model, FP8Config())
    assert report.num_exact == 2
    model.config.name_or_path = "org/another"
    assert adopt_checkpoints(model, FP8Config()) == []
