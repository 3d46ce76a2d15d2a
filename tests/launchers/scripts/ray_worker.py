"""``ray_worker.py {accelerate,trainer,ddp,model-parallel,fsdp}``: a worker as Ray starts it.

It has the environment and the process group that ``ray.train.torch`` 2.60 sets up before the loop,
and classes of the bases of ``ray.train.lightning``. Prints the losses.
"""

import os
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from ray_loops import with_accelerate, with_lightning, with_trainer

kind, RANK = sys.argv[1], int(os.environ["RANK"])


def prepare_trainer(trainer):
    """As ray.train.huggingface.transformers does."""

    class RayTransformersTrainer(trainer.__class__):
        def get_train_dataloader(self):
            return super().get_train_dataloader()

    trainer.__class__ = RayTransformersTrainer
    return trainer


def lightning_classes():
    """As ray.train.lightning has them."""
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy

    class RayLightningEnvironment(LightningEnvironment):
        creates_processes_externally = True

        def world_size(self):
            return int(os.environ["WORLD_SIZE"])

        def global_rank(self):
            return RANK

        def local_rank(self):
            return int(os.environ["LOCAL_RANK"])

        def node_rank(self):
            return 0

        def set_world_size(self, size):
            pass

        def set_global_rank(self, rank):
            pass

    class OnRaysDevice:
        root_device = torch.device("cpu")

    class RayDDPStrategy(OnRaysDevice, DDPStrategy):
        pass

    class RayFSDPStrategy(OnRaysDevice, FSDPStrategy):
        pass

    return SimpleNamespace(**locals())


dist.init_process_group("gloo", rank=RANK, world_size=2)
if kind in ("accelerate", "trainer"):  # as _TorchBackend.on_training_start does
    os.environ["LOCAL_RANK"] = os.environ["NODE_RANK"] = "0"  # a node for each worker
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
try:
    if kind == "accelerate":
        layer, losses = with_accelerate()
    elif kind == "trainer":
        layer, losses = with_trainer(prepare_trainer)
    else:
        layer, losses = with_lightning(kind, lightning_classes())
except (ValueError, TypeError) as error:
    os.write(1, f"refused: {error}\n".encode())
    os._exit(0)
text = " ".join(float(value).hex() for value in losses)
os.write(1, f"rank {RANK} losses {layer.__name__} {text}\n".encode())
dist.barrier()
os._exit(0)
