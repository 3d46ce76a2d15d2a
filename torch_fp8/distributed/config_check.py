"""Checks at start-up that all ranks run the same configuration and model.

A rank with another level, recipe or version exchanges other tensors than its peers. The collectives
then hang or, worse, succeed with wrong data. `check_same_config` detects this first, without a
collective (`torch_fp8.distributed.agreement`), and names the hosts. `check_same_parts` compares the
parts of a model.
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
from torch_fp8.distributed.agreement import (
    Compared,
    NotAllCame,
    Rank,
    compare,
    format_ranks,
    store_timeout,
)
from torch_fp8.ops.hardware import card_name
from torch_fp8.quantization.wording import first_of

_UNKNOWN = "no option"
_VERSIONS = ("torch-fp8", "torch", "Triton")
_CARD = "the card"
_MOST_HOSTS = 4


def check_same_config(config: FP8Config, group: Any = None) -> None:
    """Raise on every rank if a process group's ranks differ in configuration or version.

    All ranks must call it the same number of times. A rank that does not, because it uses no FP8 or
    another backend, counts as missing after ``config.agreement_timeout``, and the other ranks
    raise. Without a process group, or with a single rank, the function does nothing. If ranks have
    different kinds of GPU, the group's first rank warns; with recipe ``auto``, which measures one
    GPU, all ranks raise.

    Args:
        config: this rank's configuration.
        group: the process group; None: the default one.
    Raises:
        ValueError: configurations, or versions of this package, torch or Triton differ (the message
            names the values, and the hosts or ranks that have them); ranks are missing.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return
    group = group or dist.group.WORLD
    options = {name: repr(value) for name, value in asdict(config).items()}
    triton = distribution_version("triton") or "none"
    versions = dict(zip(_VERSIONS, (__version__, torch.__version__, triton), strict=True))
    description = {**versions, _CARD: _card(group), **options}
    note = ENV_VAR if os.environ.get(ENV_VAR) else ""
    compared = _compare(description, group, config.agreement_timeout, note)
    if compared is None:
        return
    differing = _differing(compared, _UNKNOWN)
    other_versions = [differing.pop(name) for name in _VERSIONS if name in differing]
    other_cards = differing.pop(_CARD, None)
    if other_versions:
        raise ValueError(
            f"ranks have different versions: {'; '.join(other_versions)}. Install the same "
            "versions on all hosts"
        )
    if differing:
        said = "; ".join(differing.values())
        raise ValueError(
            f"ranks have different FP8Configs: {said}{_hint(compared)}. Use the same FP8Config on "
            "all ranks"
        )
    if config.recipe == "auto" and not config.emulate and config.backend == "torch":
        raise ValueError(
            f"recipe 'auto' measures one kind of card, but {other_cards}. Name a recipe that all "
            "of them support, such as FP8Config(recipe='tensorwise')"
        )
    if dist.get_rank(group) == 0:
        warnings.warn(f"the slowest card sets the pace: {other_cards}", stacklevel=2)


def check_same_parts(parts: Mapping[str, str], group: Any, absent: str = "missing") -> None:
    """Raise on every rank of a process group if their models have different parts.

    All ranks of the group must call it the same number of times, within the timeout of the process
    group, because one rank may take longer to load a model than another.

    Args:
        parts: the name of each part, and a description of the part on this rank.
        group: the process group.
        absent: the description of a part that a rank does not have.
    Raises:
        ValueError: parts differ (the message names some, with their descriptions and ranks), or
            ranks are missing.
    """
    if dist.get_world_size(group) == 1:
        return
    compared = _compare(parts, group, store_timeout(), "")
    if compared is None:
        return
    differing = list(_differing(compared, absent).values())
    raise ValueError(
        f"the model differs between ranks: {first_of(differing, 3, '; ')}. Build, convert and "
        "shard the same model on all ranks, after init_process_group if the recipe is 'auto'"
    )


def _compare(
    description: Mapping[str, str], group: Any, seconds: float | None, note: str
) -> Compared | None:
    """Compare descriptions; raise ValueError with the names of missing ranks."""
    try:
        return compare(description, group, seconds, note)
    except NotAllCame as error:
        missing, came = format_ranks(error.missing), _places(error.came)
        raise ValueError(
            f"{missing} did not enable FP8 while {came} did, or did not get there within "
            f"{error.seconds:.0f} s; give all ranks the same script, flags and environment "
            f"({ENV_VAR} is {'' if os.environ.get(ENV_VAR) else 'not '}set on this one), and "
            "install torch-fp8 on all hosts"
        ) from error


def _card(group: Any) -> str:
    """Return the name and compute capability of the GPU that this rank trains on."""
    has_card = "cuda" in dist.get_backend_config(group) and torch.cuda.is_available()
    return card_name(torch.device("cuda" if has_card else "cpu"))


def _differing(compared: Compared, absent: str) -> dict[str, str]:
    """Describe each name whose value differs between ranks: the values, and which ranks have them.

    Args:
        compared: the descriptions of all ranks.
        absent: the value shown if a rank does not have a name.
    """
    differing = {}
    for name in dict.fromkeys(name for given in compared.descriptions for name in given):
        having: dict[str, list[Rank]] = {}
        for rank, given in zip(compared.ranks, compared.descriptions, strict=True):
            having.setdefault(given.get(name, absent), []).append(rank)
        if len(having) > 1:
            one_host = len({rank.host for rank in compared.ranks}) == 1
            parts = [f"{value} on {_places(some, one_host)}" for value, some in having.items()]
            differing[name] = f"{name} is {', '.join(parts)}"
    return differing


def _hint(compared: Compared) -> str:
    """Return a sentence on the ranks that set the environment variable, if only some do."""
    given = [rank for rank in compared.ranks if rank.note]
    if not 0 < len(given) < len(compared.ranks):
        return ""
    one_host = len({rank.host for rank in compared.ranks}) == 1
    return f" ({ENV_VAR} is set on {_places(given, one_host)} only)"


def _places(ranks: Sequence[Rank], ranks_alone: bool = False) -> str:
    """Format ranks by host: ``node-1 (ranks 8-15), node-2 (ranks 16-23)``.

    Args:
        ranks: some of the ranks.
        ranks_alone: whether to leave out the host if there is only one.
    """
    if ranks_alone:
        return format_ranks([rank.number for rank in ranks])
    hosts: dict[str, list[int]] = {}
    for rank in ranks:
        hosts.setdefault(rank.host, []).append(rank.number)
    shown = list(hosts.items())[:_MOST_HOSTS]
    text = ", ".join(f"{host} ({format_ranks(numbers)})" for host, numbers in shown)
    more = len(hosts) - len(shown)
    return f"{text} and {more} more hosts" if more else text
