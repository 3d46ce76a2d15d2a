import os
import re
from pathlib import Path

import pytest

from tests.accelerate_fp8.conftest import experts_in
from tests.processes import ran

pytestmark = pytest.mark.long


SCRIPTS = Path(__file__).parent / "scripts"

FP8 = ("--mixed_precision", "fp8")
LINE = re.compile(
    r"rank (\d): (\w+) losses (\S+ \S+) error (\S+) dtypes (\S+)(?: saved (\S*) resumed (\w+))?"
)
ADAMW = "exp_avg+exp_avg_sq+step"
MODES = ("O1", "O2", "full", "sparing", "O3", "release", "sgd", "frozen", "own_dtype")


def test_sharded_training_is_that_of_one_process_and_resumes_bit_for_bit(run):
    single = run("fsdp2_levels.py", *MODES, launch=FP8)
    alone = {m[2]: m[3] for m in LINE.finditer(single.stdout)}
    done = run("fsdp2_levels.py", *MODES, launch=FP8, processes=2)
    assert done.linear == 0  # layers are converted before they are sharded
    found = {(m[2], m[1]): m for m in LINE.finditer(done.stdout)}
    assert set(found) == {(mode, rank) for mode in MODES for rank in "01"}
    for (mode, rank), line in found.items():
        saved = "" if mode == "sgd" or rank != "0" else ADAMW
        assert (line[5], line[6], line[7]) == ("float32", saved, "True"), mode
        # Each rank's weights with its part of the residuals: 16 bits right.
        assert float(line[4]) <= 1.6e-5, mode
        # Both ranks have the same data. Vectors in BF16, and gradients reduced in it, differ.
        assert _numbers(line[3]) == pytest.approx(_numbers(alone[mode]), rel=0.01), mode
    for mode in ("full", "sparing", "release"):
        assert found[mode, "0"][3] == found["O2", "0"][3], mode
    for said in (
        "optimizer AdamW with 8-bit states\n",
        "optimizer AdamW with 8-bit states, 3 gradients in 8 bits\n",
        "optimizer SGD keeps its own states",
        "ranks     FSDP2: 3 weights gathered in FP8, gradients of 3 modules scattered in FP8",
        "memory    7.24 bytes per parameter, 16.00 before",
    ):
        assert said in done.stderr


def test_replicas_of_shards_exchange_8_bits_and_resume_bit_for_bit(run):
    """``ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)``, with accumulation and clipping;
    all ranks have the same data.
    """
    modes = "hsdp_O2", "hsdp_O3"
    single = run("fsdp2_levels.py", *modes, launch=FP8)
    alone = {m[2]: m[3] for m in LINE.finditer(single.stdout)}
    done = run("fsdp2_levels.py", *modes, launch=FP8, processes=4)
    found = [m.groups() for m in LINE.finditer(done.stdout)]
    assert sorted(m[:2] for m in found) == [(rank, mode) for rank in "0123" for mode in modes]
    for _, mode, losses, *_, resumed in found:
        assert resumed == "True"
        assert _numbers(losses) == pytest.approx(_numbers(alone[mode]), rel=0.01), mode
    said = "gradients of 3 modules scattered in FP8, those of 3 averaged across replicas in FP8"
    assert done.stderr.count(said) == 4  # two levels, each of which is resumed


CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: fp8
num_machines: 1
num_processes: 2
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: {}
  fsdp_cpu_ram_efficient_loading: {}
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""


@pytest.fixture
def launched(tmp_path, environment, forked_hosts):
    """``launched(model, kinds, layer, sparing)``: the output under a configuration file."""

    def launch(model, kinds, layer, sparing):
        config = tmp_path / "fsdp.yaml"
        config.write_text(CONFIG.format(layer, sparing))
        command = ["-m", "accelerate.commands.launch", "--config_file", str(config)]
        command += ["--main_process_port", "0", str(SCRIPTS / "fsdp2_config.py"), str(model)]
        search = os.pathsep.join([environment["PYTHONPATH"], str(SCRIPTS.parents[2])])
        variables = {**environment, "FP8_PROBE_OUT": str(tmp_path), "PYTHONPATH": search}
        return ran(forked_hosts, *command, *kinds, env=variables, cwd=tmp_path)

    return launch


@pytest.mark.parametrize(
    ("sparing", "kinds"),
    [("false", ["loop", "trainer", "dpo"]), ("true", ["loop", "lora"])],
    ids=["each-rank-loads", "rank-0-loads"],
)
def test_configuration_file_shards_unmodified_code(launched, tiny_model, sparing, kinds):
    done = launched(tiny_model, kinds, "LlamaDecoderLayer", sparing)
    said = re.findall(r"rank (\d): (\w+) ", done.stdout)
    assert sorted(said) == sorted((rank, kind) for kind in kinds for rank in "01"), done.stdout
    line = "ranks     FSDP2: 14 weights gathered in FP8, gradients of 2 modules scattered in FP8"
    assert line in done.stderr
    if "dpo" in kinds:
        prepared = "LlamaForCausalLM, prepared with evaluation_mode=True"
        assert f"{prepared}: 14 of 15 linear layers, recipe tensorwise" in done.stderr
        assert f"{prepared}: FSDP2: 14 weights gathered in FP8" in done.stderr


@pytest.mark.parametrize(
    "sparing",
    [
        pytest.param("true", id="rank-0-loads"),
        pytest.param("false", id="each-rank-loads", marks=pytest.mark.slow),
    ],
)
def test_a_configuration_file_shards_frozen_experts(launched, tiny_model, tmp_path, sparing):
    folder = experts_in(tmp_path / "model", tiny_model, "Qwen3Moe")
    done = launched(folder, ["experts"], "Qwen3MoeDecoderLayer", sparing)
    assert sorted(re.findall(r"rank (\d): experts", done.stdout)) == ["0", "1"]
    assert "frozen weights stored and gathered in FP8 only" in done.stderr


def _numbers(text):
    return [float(number) for number in text.split()]
