import re

import pytest

import lightning_fp8
from lightning_fp8 import FP8FSDPStrategy

pytestmark = pytest.mark.long


FLAG = "fp8-mixed"
TRAINER = ("O3 own manual evaluate", "resume tested named users offload meta")
FABRIC = "O1 apart resume stock"


@pytest.mark.parametrize(
    ("script", "host", "cases"),
    [
        ("fsdp.py", "lightning.pytorch", TRAINER[0]),
        ("fsdp.py", "lightning.pytorch", TRAINER[1]),
        ("fsdp.py", "pytorch_lightning", "O3"),
        ("fsdp_fabric.py", "lightning.fabric", FABRIC),
        pytest.param("fsdp_fabric.py", "lightning_fabric", "O3", marks=pytest.mark.smoke),
    ],
    ids=lambda value: value.replace(" ", "-"),
)
def test_two_ranks_train_as_one_process(run, script, host, cases):
    (result,) = run([script, host, *cases.split()])
    assert result.returncode == 0, result.output
    said = re.findall(r"rank (\d): (\w+) ", result.output)
    assert sorted(said) == sorted((rank, case) for case in cases.split() for rank in "01")
    line = "ranks     FSDP2: 4 weights gathered in FP8, gradients of 2 modules scattered in FP8"
    assert line in result.output
    if script == "fsdp.py":
        assert "  optimizer AdamW with 8-bit states" in result.output


def test_cli(run):
    options = {
        "accelerator": "cpu",
        "devices": "2",
        "max_steps": "2",
        "logger": "false",
        "enable_checkpointing": "false",
        "enable_progress_bar": "false",
        "enable_model_summary": "false",
        "precision": FLAG,
        "strategy": "lightning_fp8.FP8FSDPStrategy",
        "strategy.save_distributed_checkpoint": "false",
        "strategy.reshard_after_forward": "false",
    }
    command = ["cli.py", "fit", *(f"--trainer.{name}={value}" for name, value in options.items())]
    hosts = ("lightning.pytorch", "pytorch_lightning")
    for result in run(*([*command, {"HOST": host}] for host in hosts)):
        assert result.returncode == 0, result.output
        assert result.fp8_gemms == [10, 10], result.output
        assert "2 weights gathered in FP8" in result.output
        assert result.output.count("found no repeated blocks in Regression") == 1


def test_a_string_of_blocks_and_a_derived_request_are_refused():
    with pytest.raises(TypeError, match="blocks takes a sequence of class names, got 'Block'"):
        FP8FSDPStrategy(blocks="Block")
    trainers = "lightning_fp8.unified_trainer"

    class Derived(FP8FSDPStrategy):
        pass

    with pytest.raises(TypeError, match=r"derive from lightning_fp8.unified_trainer.FP8FSDP"):
        Derived().for_host(trainers)
    own = FP8FSDPStrategy(save_distributed_checkpoint=False, blocks=("Block",)).for_host(trainers)
    assert (own._save_distributed_checkpoint, own.blocks) == (False, ("Block",))
    assert own.for_host(trainers) is own
    assert "FP8FSDPStrategy" in lightning_fp8.__all__
