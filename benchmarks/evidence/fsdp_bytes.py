"""Bytes that FSDP2 sends for Llama-3.1-8B and for experts in a step, counted without running it.

    python -m benchmarks.evidence.fsdp_bytes

The model has fake tensors, with shapes but no memory, and a fake process group. FSDP2, our gathers
and our scatters run as usual, and `tests.comm_counter` counts the bytes that they pass to the
collectives in one forward and backward, with weights gathered again in backward. Each block and the
root are sharded. ``wire_bytes.csv`` gets the bytes that a rank sends, compared with BF16
collectives. The scales' collective counts as gathering.
"""

import argparse
from types import SimpleNamespace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from benchmarks.measurement import environment, print_table
from benchmarks.rows import add_csv, read_rows, write_rows
from benchmarks.shapes import LLAMA_3_1_8B_BLOCK, MOE_BLOCKS
from tests import comm_counter
from torch_fp8 import FP8Config, convert_to_float8
from torch_fp8.distributed.fsdp.connect import connect_fsdp
from torch_fp8_tools.plan.models import fake_ranks

COLUMNS = (
    *("case", "model", "ranks", "bf16_bytes", "fp8_bytes", "ratio"),
    *("torch", "commit", "date", "command"),
)
LAYERS, VOCABULARY, HIDDEN = 32, 128256, 4096


class Linears(nn.Module):
    """The linear layers of a block of Llama-3.1-8B, joined by simple arithmetic."""

    def __init__(self):
        super().__init__()
        for name, (k, n) in LLAMA_3_1_8B_BLOCK.items():
            setattr(self, name, nn.Linear(k, n, bias=False))

    def forward(self, x):
        keys = self.k_proj(x) + self.v_proj(x)
        x = x + self.o_proj(self.q_proj(x) + keys.repeat(1, 4))
        return x + self.down_proj(self.gate_proj(x) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linears = Linears()
        self.input_layernorm = nn.RMSNorm(HIDDEN)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN)

    def forward(self, x):
        return self.post_attention_layernorm(self.linears(self.input_layernorm(x)))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class Experts(nn.Module):
    """The experts of a block of Qwen3-30B-A3B; each token takes the first eight."""

    def __init__(self):
        super().__init__()
        _, self.hidden, width, count, self.top_k = MOE_BLOCKS["Qwen3-30B-A3B"]
        config = SimpleNamespace(
            hidden_size=self.hidden, moe_intermediate_size=width, num_local_experts=count
        )
        config.num_experts, config.hidden_act = count, "silu"
        config._experts_implementation = "grouped_mm"
        self.experts = Qwen3MoeExperts(config)

    def forward(self, x):
        scores = x[:, : self.top_k]
        index = torch.arange(self.top_k).expand(scores.shape)
        return self.experts(x, index, scores)


MODELS = {
    "a block's linears": lambda: nn.Sequential(Linears()),
    "Llama-3.1-8B": Llama,
    "experts of a block of Qwen3-30B-A3B": lambda: nn.Sequential(Experts()),
}


def count(communication, ranks, name):
    """Count what rank 0 of `ranks` sends in a step, as a `CommunicationCount`."""
    is_whole = name == "Llama-3.1-8B"
    config = FP8Config(opt_level="O1", communication=communication)
    with torch.device("meta"):
        model = MODELS[name]().bfloat16()
    convert_to_float8(model, config, device="cpu")
    with fake_ranks(ranks) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        blocks = list(model.layers if is_whole else model)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for module in [*blocks, model]:
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        connect_fsdp(model, config)
        made = comm_counter.CommunicationCount()
        hidden = HIDDEN if name == "a block's linears" else MOE_BLOCKS["Qwen3-30B-A3B"][1]
        x = torch.arange(16) if is_whole else torch.randn(16, hidden, dtype=torch.bfloat16)
        with comm_counter.FakeRecorder(made):
            model(x).float().sum().backward()
    return made


def rows(ranks):
    """Return, for each direction and model, the bytes that a rank sends with BF16 collectives and
    ours.
    """
    made = []
    for model in MODELS:
        stock, ours = (count(communication, ranks, model) for communication in ("off", "fp8"))
        print(model, stock, ours, sep="\n")
        gathered = ours.of("all-gather").bytes_sent + ours.of("all-reduce").bytes_sent
        scattered = ours.of("all-to-all").bytes_sent + ours.of("reduce-scatter").bytes_sent
        for way, before, after in (
            ("gather", stock.of("all-gather").bytes_sent, gathered),
            ("scatter", stock.of("reduce-scatter").bytes_sent, scattered),
        ):
            made.append(
                {
                    "case": f"FSDP2 {way}",
                    "model": model,
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
    others = [
        row for row in read_rows(options.csv) if not row["case"].startswith("FSDP2")
    ]  # of others
    where = {
        **environment(torch.device("cpu")),
        "command": "python -m benchmarks.evidence.fsdp_bytes",
    }
    made = []
    for ranks in options.ranks:
        made += [{**row, **{c: where[c] for c in COLUMNS[6:]}} for row in rows(ranks)]
        write_rows(options.csv, COLUMNS, others + made)
    print_table(COLUMNS[:6], made)


if __name__ == "__main__":
    main()
