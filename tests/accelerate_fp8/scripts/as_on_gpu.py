"""Lets a process count as one that has a GPU: Accelerate runs FSDP on GPUs only."""

import tempfile
from pathlib import Path

import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType

init = PartialState.__init__


def init_with_gpu(self, *args, **kwargs):
    init(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU


PartialState.__init__ = init_with_gpu
PartialState(cpu=True)
shared_folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(shared_folder)
output = Path(shared_folder[0])
