import re

import pytest

FLAG = "fp8-mixed"
# Two linear layers, forward, wgrad, and dgrad but for the first layer: 5 GEMMs a training step.
GEMMS_PER_STEP, GEMMS_PER_EVALUATION = 5, 2
TRAINER_GEMMS = 2 * GEMMS_PER_STEP + 2 * GEMMS_PER_EVALUATION  # with Lightning's sanity check


def assert_fp8_only_with_flag(flagged, plain, gemms_per_process):
    assert flagged.returncode == 0, flagged.output
    assert plain.returncode == 0, plain.output
    assert flagged.fp8_gemms == gemms_per_process, flagged.output
    assert plain.fp8_gemms == []
    assert flagged.output.count("of the matmul FLOPs") == 1, flagged.output
    assert "FP8" not in plain.output


@pytest.mark.parametrize("host", ["lightning", "pytorch_lightning"])  # lightning.pytorch: see below
def test_trainer(run, host):
    command = ["trainer.py", host, "auto", "1"]
    assert_fp8_only_with_flag(*run([*command, FLAG], command), [TRAINER_GEMMS])


@pytest.mark.parametrize("host", ["lightning", "lightning_fabric"])  # lightning.fabric: see below
def test_fabric(run, host):
    command = ["fabric.py", host, "auto", "1"]
    assert_fp8_only_with_flag(*run([*command, FLAG], command), [2 * GEMMS_PER_STEP])


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork", "ddp_spawn"])
def test_trainer_ddp(run, strategy):
    command = ["trainer.py", "lightning.pytorch", strategy, "2"]
    flagged, plain = run([*command, FLAG], [*command])
    assert_fp8_only_with_flag(flagged, plain, [TRAINER_GEMMS] * 2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "host"),
    [
        ("ddp", "lightning.fabric"),
        ("ddp_fork", "lightning.fabric"),
        ("ddp_spawn", "lightning_fabric"),
        ("model-parallel", "lightning.fabric"),
    ],
)
def test_fabric_ddp(run, strategy, host):
    command = ["fabric.py", host, strategy, "2"]
    flagged, plain = run([*command, FLAG], [*command])
    assert_fp8_only_with_flag(flagged, plain, [2 * GEMMS_PER_STEP] * 2)


@pytest.mark.parametrize("host", ["lightning.pytorch", "pytorch_lightning"])
def test_cli_argument_and_yaml(run, tmp_path, host):
    trainer = {
        "accelerator": "cpu",
        "devices": "1",
        "max_steps": "2",
        "logger": "false",
        "enable_checkpointing": "false",
        "enable_progress_bar": "false",
        "enable_model_summary": "false",
    }
    yaml = tmp_path / "config.yaml"
    lines = [f"  {name}: {value}" for name, value in {**trainer, "precision": FLAG}.items()]
    yaml.write_text("\n".join(["trainer:", *lines]))
    plain = ["cli.py", "fit", *(f"--trainer.{name}={value}" for name, value in trainer.items())]
    env = {"HOST": host}
    by_argument, by_yaml, without, by_variable = run(
        [*plain, f"--trainer.precision={FLAG}", env],
        ["cli.py", "fit", f"--config={yaml}", env],
        [*plain, env],
        [*plain, {**env, "PL_TRAINER_PRECISION": FLAG}],
    )
    assert_fp8_only_with_flag(by_argument, without, [2 * GEMMS_PER_STEP])
    assert_fp8_only_with_flag(by_yaml, without, [2 * GEMMS_PER_STEP])
    # The CLI gives the Trainer every argument, so that Lightning reads no variable.
    assert (by_variable.returncode, by_variable.fp8_gemms) == (0, [])
    assert by_variable.output.count(f"FP8 was requested by PL_TRAINER_PRECISION={FLAG}") == 1
    assert "its Trainer runs precision='32-true'" in by_variable.output


@pytest.mark.parametrize("package", ["lightning.fabric", "lightning_fabric"])
def test_fabric_run(run, package):
    # What the console script `fabric` does; it belongs to one of the two packages.
    start = f"from {package}.cli import _main; _main()"
    launcher = ["-c", start, "run", "--main-port=0"]
    script = ["--accelerator=cpu", "fabric.py", package, "auto", "1"]
    flagged, plain = run([*launcher, f"--precision={FLAG}", *script], [*launcher, *script])
    assert_fp8_only_with_flag(flagged, plain, [2 * GEMMS_PER_STEP])


def test_environment_variables_of_the_hosts(run):
    trainer, fabric = run(
        ["trainer.py", "lightning.pytorch", "auto", "1", {"PL_TRAINER_PRECISION": FLAG}],
        ["fabric.py", "lightning.fabric", "auto", "1", {"LT_PRECISION": FLAG}],
    )
    assert trainer.fp8_gemms == [TRAINER_GEMMS], trainer.output
    assert fabric.fp8_gemms == [2 * GEMMS_PER_STEP], fabric.output


def test_environment_variable_for_every_choice(run):
    command = ["trainer.py", "lightning.pytorch", "auto", "1", FLAG]
    rowwise, bad = run(
        [*command, {"TORCH_FP8_CONFIG": '{"recipe": "rowwise", "eval_fp8": false}'}],
        [*command, {"TORCH_FP8_CONFIG": '{"recipe": "columnwise"}'}],
    )
    assert rowwise.fp8_gemms == [2 * GEMMS_PER_STEP], rowwise.output  # none in evaluation
    assert "recipe    rowwise" in rowwise.output
    assert bad.returncode == 1
    assert "recipe='columnwise' is unknown" in bad.output


@pytest.mark.long
def test_autoload_switched_off_is_stock_behaviour(run):
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    trainer, fabric = run(
        ["trainer.py", "lightning.pytorch", "auto", "1", FLAG, off],
        ["fabric.py", "lightning_fabric", "auto", "1", FLAG, off],
    )
    for stock in (trainer, fabric):
        assert stock.returncode == 1
        assert "Precision 'fp8-mixed' is invalid" in stock.output
        assert "'fp8-mixed', 64" not in stock.output


def test_ranks_with_different_configurations_are_told_before_anything_can_hang(run):
    (result,) = run(["different_ranks.py"])
    assert result.returncode == 0, result.output
    lines = re.findall(r"^rank (\d): (.*)$", result.output, re.M)
    assert sorted(rank for rank, _ in lines) == ["0", "1"], result.output
    for _, message in lines:
        assert message.startswith("ranks have different FP8Configs: "), message
        assert "opt_level is 'O2' on rank 0, 'O1' on rank 1" in message
        assert "communication is 'auto' on rank 0, 'off' on rank 1" in message
        assert "TORCH_FP8_CONFIG is not set on rank 0, set on rank 1)" in message
