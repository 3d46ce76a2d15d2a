"""The blocks of a model, which FSDP2 gathers one at a time, found by the model's structure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

_UNIMPLEMENTED = nn.Module.forward


def find_blocks(
    model: nn.Module, classes: Sequence[str | type[nn.Module]] | None = None
) -> list[nn.Module]:
    """Return the blocks of a model in order; no block is inside another one.

    Blocks are the modules of the named classes. Without names, they are those of the classes that a
    Hugging Face model lists in ``_no_split_modules``. Otherwise, in each ``ModuleList`` or
    ``Sequential``, they are the modules whose class occurs there at least twice and that have
    submodules and parameters.

    Args:
        model: the model, not wrapped yet.
        classes: classes or their names, for models whose blocks have no such structure.
    Raises:
        ValueError: no module of the model has a named class.
    """
    if classes is not None:
        wanted = [cls if isinstance(cls, str) else cls.__name__ for cls in classes]
        present = {type(module).__name__ for module in model.modules()}
        missing = [name for name in wanted if name not in present]
        if missing:
            raise ValueError(
                f"blocks={tuple(wanted)!r}: {type(model).__name__} has no module of class "
                f"{', '.join(missing)}"
            )
        return _outermost(m for m in model.modules() if type(m).__name__ in wanted)
    declared = {n for m in model.modules() for n in getattr(m, "_no_split_modules", None) or ()}
    blocks = _outermost(m for m in model.modules() if type(m).__name__ in declared)
    return blocks or _outermost(_repeated(model))


def find_roots(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are called as a whole and together hold all parameters of `model`.

    These are its children. But if the model has parameters of its own, a child without ``forward``
    (a list of layers), or parameters that two children share, it is its own only root.
    """
    children = [child for child in model.children() if any(True for _ in child.parameters())]
    held = Counter(parameter for child in children for parameter in child.parameters())
    own = list(model.parameters(recurse=False))
    if own or max(held.values(), default=2) > 1 or not all(map(_has_forward, children)):
        return [model]
    return children


def _outermost(candidates: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the candidates, outer ones first, that are inside no other."""
    outermost, inner = [], set[nn.Module]()
    for module in candidates:
        if module not in inner:
            outermost.append(module)
            inner.update(module.modules())
    return outermost


def _repeated(model: nn.Module) -> Iterator[nn.Module]:
    for container in model.modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)):
            count = Counter(map(type, container))
            yield from (m for m in container if count[type(m)] > 1 and _is_block(m))


def _is_block(module: nn.Module) -> bool:
    inner = any(True for _ in module.children())
    return inner and _has_forward(module) and any(True for _ in module.parameters())


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not _UNIMPLEMENTED
