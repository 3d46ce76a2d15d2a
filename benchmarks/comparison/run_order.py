"""The order in which a whole run reads its data: given by the seed, resumable at any batch."""

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class RunOrder(Sampler[int]):
    """Indices for all epochs of a run, every epoch shuffled by (seed, epoch).

    Args:
        num_examples: size of the data set.
        num_samples: how many indices this process reads in the whole run.
        seed: of the shuffling.
        start: how many of them it has read already.
        rank, world_size: this process and their number; process r reads every world_size-th index.
    """

    def __init__(
        self,
        num_examples: int,
        num_samples: int,
        seed: int,
        start: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.num_examples = num_examples
        self.num_samples = num_samples
        self.seed = seed
        self.start = start
        self.rank = rank
        self.world_size = world_size

    def __len__(self) -> int:
        """Return the length of the whole run: a resumed loop goes on counting from where it was."""
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        epoch, order = -1, []
        for i in range(self.start, self.num_samples):
            position = i * self.world_size + self.rank
            if position // self.num_examples != epoch:
                epoch = position // self.num_examples
                generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
                order = torch.randperm(self.num_examples, generator=generator).tolist()
            yield order[position % self.num_examples]
