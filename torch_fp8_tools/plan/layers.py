"""The layers of a model, by kind, and the few of them that stand for all.

Layers are of one kind if they have the same modules, parameters and settings. What a layer adds to
the memory of a step depends on its kind, on whether it is the first of its kind, whose backward
frees what all share (a mask), on whether it is the first or the last of all, and under FSDP2 on the
parameters of both neighbours: backward gathers weights one layer ahead, and frees what a layer
scatters one layer later. So a model with fewer layers shows the bytes of all layers, if it has a
layer with the same kind and the same neighbours for each of them.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn

from torch_fp8_tools.plan.layouts import blocks_of, build, text_of


class Layers:
    """The repeated layers of a model.

    Attributes:
        whole: the model with all layers, on the meta device.
        kinds: the kind of each layer.
        contents: the part of each kind that decides on bytes between steps: the parameters.
        separate: whether each layer has its own parameters, and all are in one list, so that the
            bytes of some layers show those of all.
        share: whether layers share parameters.
    """

    def __init__(self, config: Any) -> None:
        """Build the model of a configuration; see `torch_fp8_tools.plan.layouts.build`."""
        self.whole = build(config)
        self._blocks = blocks_of(self.whole)
        self._config = type(text_of(config))
        number = text_of(config).num_hidden_layers
        uses = Counter(p for block in self._blocks for p in {*block.parameters()})
        self._number = number
        self.share = any(n > 1 for n in uses.values())
        self.separate = len(self._blocks) == number and not self.share
        listed = _per_layer(text_of(config), number).values()
        self.contents = [_contents(block) for block in self._blocks]
        settings = [_settings(block) for block in self._blocks]
        self.kinds = list(zip(self.contents, settings, *listed, strict=False))

    def model(self, layers: Sequence[int]) -> nn.Module:
        """Return a new model with only these layers, on the meta device."""
        if len(layers) == self._number:
            return copy.deepcopy(self.whole)
        absent = {id(block) for i, block in enumerate(self._blocks) if i not in layers}
        model: nn.Module = copy.deepcopy(self.whole, dict.fromkeys(absent, _ABSENT))
        for module in [m for m in model.modules() if isinstance(m, nn.ModuleList)]:
            for i in reversed(range(len(module))):
                if module[i] is _ABSENT:
                    del module[i]
        configs = [text_of(m.config) for m in model.modules() if hasattr(m, "config")]
        for config in {id(c): c for c in configs if isinstance(c, self._config)}.values():
            cls, values = type(config), _per_layer(config, self._number)
            fewer = {name: [value[i] for i in layers] for name, value in values.items()}
            computed = {name: fewer.pop(name) for name in values if name not in vars(config)}
            config.__class__ = type(cls.__name__, (cls,), computed)  # Jamba has no list to change
            vars(config).update(fewer, num_hidden_layers=len(layers))
        return model

    def shortest(self, layers: Sequence[int], *, sharded: bool) -> tuple[list[int], list[int]]:
        """Return the layers whose step shows that of all, and the index of each layer's twin there.

        Args:
            layers: the layers of the model.
            sharded: whether FSDP2 shards the model.
        """
        few = list(layers)
        if not self.separate:
            return few, list(range(min(len(few), len(self._blocks))))
        sights = self._sights(few, sharded)
        length = len(few) - 1
        while length > 0:
            for start in range(len(few) - length + 1):
                fewer = few[:start] + few[start + length :]
                if {*self._sights(fewer, sharded)} >= {*sights}:
                    few = fewer
                    break
            else:
                length -= 1
            length = min(length, len(few) - 1)
        places = {sight: place for place, sight in enumerate(self._sights(few, sharded))}
        return few, [places[sight] for sight in sights]

    def _sights(self, layers: list[int], sharded: bool) -> list[Any]:
        """Describe each layer with its neighbours."""
        beside = [self.contents[i] if sharded else 0 for i in layers]
        kinds = [self.kinds[i] for i in layers]
        is_first = [kind not in kinds[:place] for place, kind in enumerate(kinds)]
        return list(zip(kinds, is_first, [None, *beside], [*beside[1:], None], strict=False))


_ABSENT = nn.Identity()


def _per_layer(config: Any, number: int) -> dict[str, Any]:
    """Return the lists of a configuration, stored or computed, with an item for each layer."""
    # The properties of every configuration are names that transformers warns of.
    own = [
        cls for cls in type(config).__mro__ if not cls.__module__.endswith("configuration_utils")
    ]
    computed = {n for cls in own for n, value in vars(cls).items() if isinstance(value, property)}
    computed = {name for name in computed if not name.startswith("_")}
    values = {name: getattr(config, name, None) for name in sorted(computed)} | vars(config)
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, (list, tuple))
        and [*value] != [*range(number)]
        and len(value) == number
    }


def _contents(block: nn.Module) -> tuple[Any, ...]:
    """Describe the modules and parameters of a layer."""
    parameters = tuple((name, p.shape) for name, p in block.named_parameters())
    return parameters, *((name, type(module)) for name, module in block.named_modules())


def _settings(block: nn.Module) -> tuple[Any, ...]:
    """Describe what a layer's modules are set to; numbers are left out, such as a layer's own."""
    return tuple(
        (at, name, value if isinstance(value, (str, bool)) else type(value))
        for at, module in block.named_modules()
        for name, value in vars(module).items()
        if not name.startswith("_")
    )
