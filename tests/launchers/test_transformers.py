"""Models that transformers shards itself: ``from_pretrained(distributed_config=...)``."""

import re

import pytest

from tests.launchers.conftest import SCRIPTS

pytestmark = pytest.mark.long
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node", 2)


def run(outputs, tmp_path, kind):
    (text,) = outputs([*TORCHRUN, SCRIPTS / "distributed_config.py", kind, tmp_path / "model"])
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
