"""Bytes that tensor and sequence parallelism send, counted without running anything.

    python -m benchmarks.evidence.tensor_parallel_bytes

The MLP and the attention's projections of a Llama-3.1-8B block on 8,192 tokens, forward and
backward, with fake tensors and a fake process group; `tests.comm_counter` counts the bytes that
torch's styles (``communication="off"``) and ours pass to the collectives. If our layers gather
their input again in backward, torch's gather of it counts twice. ``wire_bytes.csv`` gets the bytes
that a rank sends, compared with BF16 collectives.
"""

import argparse

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from benchmarks.evidence.fsdp_bytes import COLUMNS, HIDDEN
from benchmarks.measurement import environment, print_table
from benchmarks.rows import add_csv, read_rows, write_rows
from benchmarks.shapes import LLAMA_3_1_8B_BLOCK
from tests import comm_counter
from torch_fp8 import FP8Config, convert_to_float8
from torch_fp8.distributed.tensor_parallel.styles import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)
from torch_fp8_tools.plan.models import fake_ranks

TOKENS = 8192


class Part(nn.Module):
    """Column-wise layers that share an input, and the row-wise one after them."""

    def __init__(self, columns, row):
        super().__init__()
        for name in (*columns, row):
            setattr(self, name, nn.Linear(*LLAMA_3_1_8B_BLOCK[name], bias=False))
        self.columns, self.row = columns, row

    def forward(self, x):
        made = [getattr(self, name)(x) for name in self.columns]
        y = made[0]
        for other in made[1:]:
            y = y + other.sum(-1, keepdim=True)
        return getattr(self, self.row)(y)


def parts():
    return {
        "a pair (up, down)": Part(("up_proj",), "down_proj"),
        "MLP (gate and up, down)": Part(("gate_proj", "up_proj"), "down_proj"),
        "attention (q, k and v, o)": Part(("q_proj", "k_proj", "v_proj"), "o_proj"),
    }


def plan_of(part, sequence, again):
    prepared = PrepareFloat8ModuleInput(
        input_layouts=Shard(1) if sequence else Replicate(),
        desired_input_layouts=Replicate(),
        gather_in_backward=again,
    )
    out = Float8RowwiseParallel(output_layouts=Shard(1) if sequence else Replicate())
    return {"": prepared, **{n: Float8ColwiseParallel() for n in part.columns}, part.row: out}


def count(name, communication, ranks, sequence, again):
    """Count what rank 0 of `ranks` sends in a step, as a `CommunicationCount`."""
    with torch.device("meta"):
        part = parts()[name].bfloat16()
    config = FP8Config(opt_level="O1", communication=communication)
    convert_to_float8(part, config, device="cpu")
    with fake_ranks(ranks) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        part.to_empty(device="cpu")
        parallelize_module(part, mesh, plan_of(part, sequence, again), src_data_rank=None)
        local = TOKENS // ranks if sequence else TOKENS
        x = torch.randn(1, local, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        placement = Shard(1) if sequence else Replicate()
        made = comm_counter.CommunicationCount()
        with comm_counter.FakeRecorder(made):
            part(DTensor.from_local(x, mesh, [placement])).float().sum().backward()
    return made


def rows(ranks):
    made = []
    for name in parts():
        for case, sequence, again in (
            ("sequence parallel", True, False),
            ("sequence parallel, gathered again", True, True),
            ("tensor parallel", False, False),
        ):
            stock = count(name, "off", ranks, sequence, False)
            ours = count(name, "fp8", ranks, sequence, again)
            print(case, name, stock, ours, sep="\n")
            before, after = stock.bytes_sent, ours.bytes_sent
            if again:  # of the input and of the gradient of the output, which are as large
                before += stock.of("all-gather").bytes_sent / 2
            made.append(
                {
                    "case": case,
                    "model": name,
                    "ranks": ranks,
                    "bf16_bytes": int(before),
                    "fp8_bytes": int(after),
                    "ratio": f"{after / before:.4f}",
                }
            )
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    add_csv(parser, "wire_bytes")
    options = parser.parse_args()
    made = []
    command = "python -m benchmarks.evidence.tensor_parallel_bytes"
    where = {**environment(torch.device("cpu")), "command": command}
    for ranks in options.ranks:
        made += [{**row, **{c: where[c] for c in COLUMNS[6:]}} for row in rows(ranks)]
    others = [row for row in read_rows(options.csv) if "parallel" not in row["case"]]  # of others
    write_rows(options.csv, COLUMNS, others + made)
    print_table(COLUMNS[:6], made)


if __name__ == "__main__":
    main()
