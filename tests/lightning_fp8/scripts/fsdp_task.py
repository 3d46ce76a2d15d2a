"""What the scripts of `FP8FSDPStrategy` train, and how one process trains it on all the data."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import torch_fp8

STEPS, WIDTH, VOCABULARY = 8, 96, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 131), nn.Linear(131, WIDTH)  # uneven shards

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.streams = set()

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            self.streams.add(x.dtype)
            x = layer(x)
        return self.lm_head(self.norm(x))


def make_net():
    torch.manual_seed(0)
    return Net()


def tokens(step, rank=0, world_size=1):
    torch.manual_seed(100 + step)
    return torch.randint(0, VOCABULARY, (8, 5))[rank::world_size]


def loss(net, x):
    target = (x * 7 % VOCABULARY).flatten()
    return nn.functional.cross_entropy(net(x).float().flatten(0, 1), target)


def train(config, accumulate=1, clip=None):
    net = make_net()
    torch_fp8.convert_to_float8(net, config)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    torch_fp8.convert_optimizer(optimizer, config, model=net)
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            (loss(net, tokens(step)) / accumulate).backward()
        if (step + 1) % accumulate == 0:
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    torch_fp8.restore_weights(optimizer)
    return net


def whole(parameters):
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in parameters]


def similarity(parameters, config, **options):
    """The cosine between the way that training has gone and the way that one process goes."""
    start, target = make_net(), train(config, **options)
    ours = [a - b for a, b in zip(whole(parameters), start.parameters(), strict=True)]
    theirs = [a - b for a, b in zip(target.parameters(), start.parameters(), strict=True)]
    a, b = (torch.cat([t.detach().flatten() for t in tensors]) for tensors in (ours, theirs))
    return torch.cosine_similarity(a, b, dim=0).item()
