import re

import pytest

from tests.launchers.conftest import SCRIPTS

pytestmark = pytest.mark.long
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node", 2)


def run(outputs, tmp_path, kind, *hosts):
    script = SCRIPTS / "distributed_config.py"
    variables = {"ACCELERATE_MIXED_PRECISION": "fp8"} if hosts else {}
    (text,) = outputs([*TORCHRUN, script, kind, tmp_path / "model", *hosts, variables])
    return text


def test_shards_of_fsdp2_train(outputs, tmp_path):
    text = run(outputs, tmp_path, "fsdp")
    lines = re.findall(r"rank \d converted 14 gathers 14: (.*)", text)
    assert len(lines) == 2, text
    for line in lines:
        first, *_, last = map(float, line.split())
        assert last < first - 0.2


def test_tensor_parallelism_is_refused_by_name_before_training(outputs, tmp_path):
    text = run(outputs, tmp_path, "tp")
    said = "for tensor parallelism of another library (transformers' tp_plan)"
    assert text.count(said) >= 2, text
    assert text.count("refused: no linear layer of LlamaForCausalLM can run in FP8") == 2


@pytest.mark.parametrize("kind", ["tp", "fsdp"])
def test_accelerate_refuses_a_model_that_comes_sharded_before_training(outputs, tmp_path, kind):
    """It would wrap the model in DDP, which fails in the middle of its own set-up."""
    text = run(outputs, tmp_path, kind, "accelerate")
    said = "refused: ValueError: (FSDP)?LlamaForCausalLM is already sharded, by from_pretrained"
    assert len(re.findall(said, text)) == 2, text
    assert "runs without FP8" not in text


def test_the_trainer_trains_shards_of_fsdp2_and_refuses_tensor_parallelism(outputs, tmp_path):
    text = run(outputs, tmp_path, "fsdp", "trainer")
    assert len(re.findall(r"rank \d trained: \[\d", text)) == 2, text
    assert "14 of 15 linear layers" in text
    assert "16 weights stay float32: they were sharded before" in text
    text = run(outputs, tmp_path, "tp", "trainer")
    said = r"refused: ValueError: mixed_precision='fp8' .* does not support tensor parallelism"
    assert len(re.findall(said, text)) == 2, text


def test_the_trainer_trains_experts_that_are_divided_among_ranks(outputs, tmp_path):
    text = run(outputs, tmp_path, "ep", "trainer")
    assert len(re.findall(r"rank \d trained: \[\d", text)) == 2, text
    assert "12 of 13 linear layers" in text  # 8 of attention, and 4 fused weights
