import pytest

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("host", "strategy", "level", "kind"),
    [
        ("lightning.pytorch", "ddp", "O2", "automatic"),
        ("pytorch_lightning", "ddp_fork", "O3", "manual hook"),
        pytest.param("pytorch_lightning", "ddp_fork", "O3", "accumulate", marks=pytest.mark.smoke),
        ("lightning.pytorch", "ddp_spawn", "O3", "manual"),
        ("pytorch_lightning", "ddp_fork", "O3", "unused"),
        ("lightning.fabric", "ddp_spawn", "O3", "fabric"),
    ],
)
def test_two_ranks_train_as_one_process(run, host, strategy, level, kind):
    (result,) = run(["data_parallel.py", host, strategy, level, kind])
    assert result.returncode == 0, result.output
    assert result.output.count("ranks agree") == 2, result.output
    assert result.output.count("of the matmul FLOPs") == 1
    users = "averaged in FP8 if they have 8 bits (2), others in their dtype: ddp_comm_hook of DDP"
    ours = "ranks     2, gradients averaged in FP8, 1.03 bytes each"
    assert result.output.count(users if kind == "manual hook" else ours) == 1, result.output
    reason = "no gradients in 8 bits: DistributedDataParallel(find_unused_parameters=True)"
    assert (reason in result.output) == (kind == "unused")


@pytest.mark.parametrize("script", ["trainer.py", "fabric.py"])
def test_gradient_release_is_refused_under_ddp(run, script):
    config = {"TORCH_FP8_CONFIG": '{"gradient_release": true}'}
    (result,) = run([script, "lightning", "ddp_fork", "2", "fp8-mixed", config])
    assert result.returncode != 0
    assert "steps on gradients before DistributedDataParallel" in result.output
