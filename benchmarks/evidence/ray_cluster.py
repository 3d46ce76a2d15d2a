"""A Ray cluster of this machine, whose TorchTrainer runs each host with two workers. ::

    python -m benchmarks.evidence.ray_cluster FOLDER [HOST ...]

Each worker writes its losses to a file of its own in FOLDER. The loops are those of
`tests/launchers/test_ray.py`, which needs no Ray.
"""

import sys
import tempfile
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ("accelerate", "trainer", "ddp", "model-parallel", "fsdp")


def loop(config):
    """Run a host's loop in a worker; write the class of a layer, and the losses."""
    from tests.launchers.scripts import ray_loops

    kind, context = config["kind"], ray.train.get_context()
    if kind == "accelerate":
        layer, losses = ray_loops.with_accelerate()
    elif kind == "trainer":
        from ray.train.huggingface.transformers import prepare_trainer

        layer, losses = ray_loops.with_trainer(prepare_trainer)
    else:
        from ray.train import lightning

        # "auto" is one device on a CPU, and ModelParallelStrategy takes that of the local rank.
        devices = context.get_local_world_size()
        layer, losses = ray_loops.with_lightning(kind, lightning, devices)
    text = " ".join(map(str, [layer.__name__, *losses]))
    Path(config["folder"], f"{kind}-{context.get_world_rank()}").write_text(text)


def main():
    folder, hosts = Path(sys.argv[1]), sys.argv[2:] or HOSTS
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as logs:  # sockets: short paths
        ray.init(
            num_cpus=3,
            include_dashboard=False,
            object_store_memory=80_000_000,
            _temp_dir=logs,
            runtime_env={"env_vars": variables},
        )
        for kind in hosts:
            precision = {"ACCELERATE_MIXED_PRECISION": "fp8"} if kind == "trainer" else {}
            trainer = TorchTrainer(
                loop,
                train_loop_config={"kind": kind, "folder": str(folder)},
                scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
                run_config=RunConfig(
                    storage_path=str(folder), worker_runtime_env={"env_vars": precision}
                ),
            )
            try:
                trainer.fit()
            except Exception as error:
                print(f"{kind} refused: {error}", flush=True)
        ray.shutdown()


if __name__ == "__main__":
    main()
