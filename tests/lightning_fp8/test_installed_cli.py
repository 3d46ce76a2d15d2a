"""Lightning's CLI with Lightning's own demonstration model: the flag, a YAML file, the environment.

Its model has one linear layer: forward and wgrad make two GEMMs a step.
"""

import pytest

DEMOS = "lightning.pytorch.demos.boring_classes"
CLI = [
    "-c",
    "from lightning.pytorch.cli import LightningCLI as CLI; CLI(save_config_callback=None)",
]
MODEL = ["--model", f"{DEMOS}.DemoModel", "--model.out_dim", "16"]
DATA = ["--data", f"{DEMOS}.BoringDataModule"]
QUICK = {
    "accelerator": "cpu",
    "max_steps": "2",
    "logger": "false",
    "limit_val_batches": "0",
    "enable_progress_bar": "false",
    "enable_checkpointing": "false",
}
TRAINER = [f"--trainer.{name}={value}" for name, value in QUICK.items()]
FIT = [*CLI, "fit", *MODEL, *DATA, *TRAINER]


@pytest.fixture
def yaml(tmp_path):
    path = tmp_path / "fp8.yaml"
    lines = [f"  {name}: {value}" for name, value in QUICK.items()]
    path.write_text("\n".join(["trainer:", *lines, "  precision: fp8-mixed"]))
    return str(path)


def test_flag_and_yaml_and_what_the_environment_does_not_reach(run, yaml):
    flag, file, environment = run(
        [*FIT, "--trainer.precision", "fp8-mixed"],
        [*CLI, "fit", *MODEL, *DATA, "--config", yaml],
        # The CLI gives the Trainer every argument, so that Lightning reads no variable.
        [*FIT, {"PL_TRAINER_PRECISION": "fp8-mixed"}],
    )
    for done in (flag, file):
        assert done.returncode == 0, done.output
        assert done.fp8_gemms == [2 * 2], done.output
        assert "1 of 1 linear layer," in done.output
        assert "FP8 was requested" not in done.output
    assert environment.returncode == 0, environment.output
    assert environment.fp8_gemms == []
    assert environment.output.count("FP8 was requested by PL_TRAINER_PRECISION=fp8-mixed") == 1
    assert "its Trainer runs precision='32-true'" in environment.output
