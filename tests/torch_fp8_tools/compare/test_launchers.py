"""``torch-fp8 compare`` behind each launcher of docs/many_nodes.md, or refused by its name."""

import json
import os
from pathlib import Path

import pytest
import torch
from IPython.core.profiledir import ProfileDir

from examples.sft import quick_model, quick_rows
from tests.internals import machine
from tests.internals import trials_module as trials
from tests.processes import free_port, side_by_side
from tests.torch_fp8_tools.compare.conftest import PROGRAM

SRUN = """
export SLURM_JOB_ID=1 SLURM_JOB_NAME=train SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=1 SLURM_NNODES=2
export SLURM_NODELIST=localhost SLURM_STEP_NODELIST=localhost SLURM_STEP_NUM_TASKS=2
number() { export SLURM_LOCALID=0 SLURM_PROCID=$1 SLURM_NODEID=$1; }
"""
MPIRUN = """
export OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2
number() { export OMPI_COMM_WORLD_RANK=$1 OMPI_COMM_WORLD_LOCAL_RANK=$1; }
"""
LAUNCHER = """#!/bin/bash
{variables}
for rank in 0 1; do
  (number $rank; exec "$@") &
  pids+=($!)
done
for pid in "${{pids[@]}}"; do wait "$pid" || status=$?; done
exit ${{status:-0}}
"""


@pytest.fixture
def on_path(tmp_path, monkeypatch):
    """``on_path(name, variables)``: a launcher that starts two ranks with these variables."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))

    def make(name, variables):
        path = tmp_path / "bin" / name
        path.parent.mkdir()
        path.write_text(LAUNCHER.format(variables=variables))
        path.chmod(0o755)

    return make


def check(status, report, ranks, steps=6):
    assert status == 0, report
    bf16, fp8 = report["variants"]
    assert report["ranks"] == ranks == len(fp8["peak_bytes_by_rank"])
    assert bf16["steps"] == fp8["steps"] == steps
    assert (bf16["fp8_layers"], fp8["fp8_layers"]) == (0, 2)
    assert 0 < abs(fp8["loss_difference"]) < 0.01
    assert "not redirected" not in str(report["notes"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "variables", "words"),
    [
        ("srun", SRUN, ("trainer", "--nodes", 2)),
        pytest.param("mpirun", MPIRUN, ("accelerate",), marks=pytest.mark.combination),
    ],
)
def test_a_launcher_that_starts_all_ranks(name, variables, words, compare, on_path, forked_hosts):
    on_path(name, variables)
    check(*compare(*words, steps=6, launch=[name, forked_hosts, str(PROGRAM)]), ranks=2)


@pytest.mark.long
def test_shards_of_fsdp2_behind_torchrun(compare, forked_hosts):
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    port = ["--master-port", str(free_port())]
    launch = [forked_hosts, *torchrun, *port, str(PROGRAM)]
    status, report = compare("fsdp2", steps=6, launch=launch)
    check(status, report, ranks=2)
    starts = Path("out/O2-seed0/rank1.jsonl").read_text()
    assert json.loads(next(x for x in starts.splitlines() if "weights" in x))["weights"] > 0


@pytest.mark.long
@pytest.mark.parametrize(("steps", "end"), [(6, "steps"), (20, "program")])
def test_a_launcher_of_notebooks(steps, end, compare, monkeypatch):
    """Its forks end without `atexit`. It waits for ever for the result of one that ends early."""
    monkeypatch.setattr(trials, "_GRACE_S", 1.0)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    check(*compare("notebook", steps=steps), ranks=2, steps=min(steps, 8))
    for rank in range(2):
        last = Path(f"out/O2-seed0/rank{rank}.jsonl").read_text().splitlines()[-1]
        assert json.loads(last)["end"] == end
        assert len(json.loads(last)["fingerprints"]) == 3


def test_a_training_in_a_thread_as_rays_workers_start_it(compare):
    check(*compare("thread", steps=6), ranks=1)


@pytest.mark.long
def test_run_in_a_notebook(compare, forked_hosts, tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    ProfileDir.create_profile_dir_by_name(tmp_path, "default")  # IPython writes it if it is missing
    command = f"%run {PROGRAM} accelerate"
    check(*compare(command, steps=6, launch=[forked_hosts, "-m", "IPython", "-c"]), ranks=1)


@pytest.mark.long
def test_trls_own_script_that_uploads_its_model(compare, forked_hosts, tmp_path):
    torch.manual_seed(0)
    for part in quick_model():
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    lines = [f"{json.dumps(row)}\n" for row in quick_rows()[:40]]
    (tmp_path / "data/train.jsonl").write_text("".join(lines))
    words = "--model_name_or_path model --dataset_name data --output_dir mine --push_to_hub"
    words += " --max_steps 9 --per_device_train_batch_size 2 --max_length 64 --use_cpu"
    launch = [forked_hosts, "-m", "trl.scripts.sft"]
    status, report = compare(*words.split(), steps=4, launch=launch)
    assert status == 0, report
    bf16, fp8 = report["variants"]
    assert bf16["steps"] == fp8["steps"] == 4
    assert (fp8["fp8_layers"], fp8["layers"]) == (14, 15)
    assert 0 < abs(fp8["loss_difference"]) < 0.01
    assert "TrainingArguments(push_to_hub=True) was left out" in str(report["notes"])
    assert not (tmp_path / "mine").exists()


@pytest.mark.long
def test_two_machines_compare_side_by_side(tmp_path, forked_hosts):
    """Each with a launcher of its own, into a folder of its own below the same ``--output``."""
    launch = [forked_hosts, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes"]
    launch += ["2", "--num_machines", "2", "--main_process_ip", "127.0.0.1", "--rdzv_backend"]
    launch += ["static", "--main_process_port", str(free_port()), "--mixed_precision", "bf16"]
    given = ["--steps", "6", "--no-repeat", "--output", "out"]
    root = str(Path(__file__).resolve().parents[3])
    command = [forked_hosts, "-m", "torch_fp8", "compare", *given, "--", *launch, "--machine_rank"]
    commands = [[*command, rank, PROGRAM, "accelerate"] for rank in range(2)]
    printed = side_by_side(((words, {"PYTHONPATH": root}) for words in commands), tmp_path)
    for rank in range(2):
        report = json.loads((tmp_path / f"out/machine-{rank}/report.json").read_text())
        assert [variant["steps"] for variant in report["variants"]] == [6, 6]
        assert report["ranks"] == 2
        assert "These are 1 of 2 ranks" in printed[rank]


ALONE = ["python", "train.py"]


@pytest.mark.parametrize(
    ("command", "environment", "name"),
    [
        (ALONE, {}, None),
        (["torchrun", "--nnodes=1", "train.py"], {}, None),
        (["torchrun", "--nnodes", "2", "--node-rank=1", "train.py"], {}, "machine-1"),
        (["accelerate", "launch", "--num_machines", "2", "--machine_rank", "0"], {}, "machine-0"),
        (["srun", *ALONE], {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),
    ],
)
def test_commands_of_one_machine_and_of_several(command, environment, name):
    assert machine(command, environment) == name


@pytest.mark.parametrize(
    ("command", "environment", "message"),
    [
        (["sbatch", "job.sh"], {}, "sbatch starts no process of this comparison: it only queues"),
        (["ray", "job", "submit"], {}, "ray job submit -- torch-fp8 compare"),
        (["sky", "launch"], {}, "in the task's run: section"),
        (ALONE, {"SLURM_STEP_NUM_TASKS": "8"}, "in front of the launcher: torch-fp8 compare -- sr"),
        (ALONE, {"OMPI_COMM_WORLD_SIZE": "2"}, "each of 2 processes .OMPI_COMM_WORLD_SIZE=2"),
    ],
)
def test_what_only_queues_or_starts_the_comparison_itself_is_refused(command, environment, message):
    with pytest.raises(ValueError, match=message):
        machine(command, environment)
