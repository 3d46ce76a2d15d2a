"""The check at start-up that all ranks run the same configuration and model.

A rank with another level, recipe or version exchanges other tensors than its peers. The collectives
then hang or, worse, succeed with wrong data. The check detects this first, without a collective
(`torch_fp8.distributed.agreement`), and names the hosts.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from torch_fp8._version import __version__, distribution_version
from torch_fp8.config import ENV_VAR, FP8Config
from torch_fp8.distributed.agreement import Rank, format_places, meet
from torch_fp8.ops.hardware import card_name
from torch_fp8.quantization.wording import first_of

_VERSIONS = ("torch-fp8", "torch", "Triton")
_CARD = "the card"


def check_same_config(
    config: FP8Config,
    group: Any = None,
    parts: Mapping[str, str] | None = None,
    absent: str = "missing",
    seconds: float | None = None,
) -> None:
    """Raise on every rank if a process group's ranks differ in configuration, version or model.

    All ranks must call it the same number of times. A rank that does not, because it uses no FP8 or
    another backend, counts as missing when the time is over, and the other ranks raise. Without a
    process group, or with a single rank, the function does nothing. If ranks have different kinds
    of GPU, the group's first rank warns; with recipe ``auto``, which measures one GPU, all ranks
    raise.

    Args:
        config: this rank's configuration.
        group: the process group, or None for the default one.
        parts: a description of each part of the model on this rank, by name.
        absent: the description of a part that a rank does not have.
        seconds: the time to wait for all ranks, or None for ``config.agreement_timeout``.
    Raises:
        ValueError: configurations, parts, or versions of this package, torch or Triton differ (the
            message names the values, and the hosts or ranks that have them); ranks are missing.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return
    group = group or dist.group.WORLD
    options = {name: repr(value) for name, value in asdict(config).items()}
    triton = distribution_version("triton") or "none"
    versions = dict(zip(_VERSIONS, (__version__, torch.__version__, triton), strict=True))
    variable = "set" if os.environ.get(ENV_VAR) else "not set"
    own = {**versions, _CARD: _card(group), ENV_VAR: variable, **options}
    ranks = meet({**own, **(parts or {})}, group, seconds or config.agreement_timeout)
    differing = _differing(ranks, absent)
    of_versions = [differing.pop(name) for name in _VERSIONS if name in differing]
    of_variable, of_cards = differing.pop(ENV_VAR, None), differing.pop(_CARD, None)
    of_options = [differing.pop(name) for name in options if name in differing]
    if of_versions:
        raise ValueError(
            f"ranks have different versions: {'; '.join(of_versions)}. Install the same versions "
            "on all hosts"
        )
    if of_options:
        hint = f" ({of_variable})" if of_variable else ""
        raise ValueError(
            f"ranks have different FP8Configs: {'; '.join(of_options)}{hint}. Use the same "
            "FP8Config on all ranks"
        )
    if of_cards and config.recipe == "auto" and not config.emulate and config.backend == "torch":
        raise ValueError(
            f"recipe 'auto' measures one kind of card, but {of_cards}. Name a recipe that all of "
            "them support, such as FP8Config(recipe='tensorwise')"
        )
    if differing:
        raise ValueError(
            f"the model differs between ranks: {first_of(list(differing.values()), 3, '; ')}. "
            "Build, convert and shard the same model on all ranks, after init_process_group if the "
            "recipe is 'auto'"
        )
    if of_cards and dist.get_rank(group) == 0:
        warnings.warn(f"the slowest card sets the pace: {of_cards}", stacklevel=2)


def _card(group: Any) -> str:
    """Return the name and compute capability of the GPU that this rank trains on."""
    has_card = "cuda" in dist.get_backend_config(group) and torch.cuda.is_available()
    return card_name(torch.device("cuda" if has_card else "cpu"))


def _differing(ranks: Sequence[Rank], absent: str) -> dict[str, str]:
    """Describe each name whose value differs between ranks: the values, and which ranks have them.

    Args:
        ranks: the ranks with their descriptions.
        absent: the value shown if a rank does not have a name.
    """
    differing = {}
    one_host = len({rank.host for rank in ranks}) == 1
    for name in dict.fromkeys(name for rank in ranks for name in rank.description):
        having: dict[str, list[Rank]] = {}
        for rank in ranks:
            having.setdefault(rank.description.get(name, absent), []).append(rank)
        if len(having) > 1:
            parts = [
                f"{value} on {format_places(some, one_host)}" for value, some in having.items()
            ]
            differing[name] = f"{name} is {', '.join(parts)}"
    return differing
