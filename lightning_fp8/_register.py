"""The extension points in Lightning; `_fp8_autoload` calls these functions with the imported
module.

Lightning is published twice, as ``lightning`` (with ``lightning.fabric`` and ``lightning.pytorch``)
and as ``lightning_fabric`` and ``pytorch_lightning``: two full copies of the code with separate
classes. Three points are extended in each: the choices of ``precision``, and the two connectors
that turn ``precision`` and ``plugins`` into a precision plugin. The rest uses Lightning's Precision
interface.

Each function may be called twice. If the upstream name has moved, it raises AttributeError before
it changes anything.
"""

import contextlib
import functools
import sys
from importlib import import_module
from types import ModuleType
from typing import Any, Union, get_args

PRECISION = "fp8-mixed"
# Near misses of the precision's name, in lower case without hyphens and underscores.
_NEARLY = ("fp8", "fp8mixed", "fp8true", "float8", "float8mixed", "8mixed")

# Connector module -> the module with the plugin class for that connector's host.
PLUGINS = {
    "lightning.fabric.connector": "lightning_fp8.unified_fabric",
    "lightning.pytorch.trainer.connectors.accelerator_connector": "lightning_fp8.unified_trainer",
    "lightning_fabric.connector": "lightning_fp8.standalone_fabric",
    "pytorch_lightning.trainer.connectors.accelerator_connector": (
        "lightning_fp8.standalone_trainer"
    ),
}

# Public classes that a user creates; the modules above turn them into the host's own classes.
REQUESTS = {"FP8Precision": "lightning_fp8.precision", "FP8FSDPStrategy": "lightning_fp8.fsdp"}


def extend_precision_choices(module: Any) -> None:
    """Add ``fp8-mixed`` to the precision strings in the module that defines them.

    All other modules copy the two names, so they are replaced before that happens. If Lightning was
    imported first, it is too late to replace them; then the type, which all copies share, is
    changed in place.
    """
    if _too_old(module):
        with contextlib.suppress(AttributeError):  # so that the connector raises the refusal
            _add_choice(module)
        return
    _add_choice(module)


def _add_choice(module: Any) -> None:
    literal = module._PRECISION_INPUT_STR
    if PRECISION in get_args(literal):
        return
    choices = (*get_args(literal), PRECISION)
    fabric = module.__name__.removesuffix(".plugins.precision.precision")
    if f"{fabric}.connector" in sys.modules:
        literal.__args__ = choices
        return
    parts, extended = get_args(module._PRECISION_INPUT), literal.copy_with(choices)
    module._PRECISION_INPUT_STR = extended
    module._PRECISION_INPUT = Union[tuple(extended if p == literal else p for p in parts)]  # noqa: UP007


def extend_fabric_connector(module: ModuleType) -> None:
    """Make Fabric's connector accept ``fp8-mixed`` and `FP8Precision`."""
    _extend_connector(module, "_Connector", "_precision_input", "_precision_instance")


def extend_trainer_connector(module: ModuleType) -> None:
    """Make the Trainer's connector accept ``fp8-mixed`` and `FP8Precision`."""
    _extend_connector(module, "_AcceleratorConnector", "_precision_flag", "_precision_plugin_flag")


def _extend_connector(module: ModuleType, name: str, flag: str, instance: str) -> None:
    """Wrap the connector's ``__init__`` and ``_check_and_init_precision``.

    Args:
        module: the module that defines the connector.
        name: the name of the connector's class.
        flag: the attribute that holds the precision string.
        instance: the attribute that holds the user's plugin, or None.
    """
    too_old = _too_old(module)
    if too_old is not None:
        _refuse_when_asked(getattr(module, name), too_old)
        return
    try:
        connector = getattr(module, name)
        init, check = connector.__init__, connector._check_and_init_precision
    except AttributeError:
        _withdraw_choice(module)
        raise
    if hasattr(check, "_fp8_original"):
        return
    plugin_module = PLUGINS[module.__name__]

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        # The environment may have requested FP8 after torch was imported.
        import_module("_fp8_autoload").load("lightning_fp8")
        for name in {"plugins", "strategy"} & kwargs.keys():
            kwargs[name] = _for_host(plugin_module, kwargs[name])
        _refuse_nearly(kwargs.get("precision"))
        _refuse_deepspeed(kwargs)
        init(self, *args, **kwargs)

    @functools.wraps(check)
    def _check_and_init_precision(self: Any) -> Any:
        plugin = getattr(self, instance, None)
        if plugin is None and getattr(self, flag, None) == PRECISION:
            plugin = import_module(plugin_module).FP8Precision()
        plugin = _for_host(plugin_module, plugin)
        if _class_of_ours(plugin) is None:
            if _class_of_ours(self.strategy) is not None:
                raise ValueError(
                    "FP8FSDPStrategy only supports FP8: set precision='fp8-mixed' or "
                    "plugins=[FP8Precision(...)]; without FP8 use ModelParallelStrategy"
                )
            return check(self)
        plugin.attach(self.strategy, self.accelerator)
        return plugin

    _replace(connector, "__init__", __init__, init)
    _replace(connector, "_check_and_init_precision", _check_and_init_precision, check)


def _too_old(module: ModuleType) -> str | None:
    return import_module("lightning_fp8._versions").refusal(module.__name__.partition(".")[0])


def _refuse_when_asked(connector: Any, line: str) -> None:
    """Make the `connector` of an old Lightning raise `line` if FP8 is requested."""
    init = connector.__init__
    if hasattr(init, "_fp8_original"):
        return

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if _asks_for_fp8(kwargs) or _class_of_ours(kwargs.get("strategy")):
            raise ImportError(line)
        init(self, *args, **kwargs)

    _replace(connector, "__init__", __init__, init)


def _asks_for_fp8(given: dict[str, Any]) -> bool:
    """Return whether a host's arguments request FP8 by the flag or the plugin."""
    plugins = given.get("plugins")
    listed = plugins if isinstance(plugins, list) else [plugins]
    return given.get("precision") == PRECISION or any(map(_class_of_ours, listed))


def _refuse_nearly(precision: object) -> None:
    """Raise ValueError for a misspelled ``fp8-mixed``."""
    if not isinstance(precision, str) or precision == PRECISION:
        return
    if precision.lower().replace("-", "").replace("_", "") in _NEARLY:
        raise ValueError(f"precision={precision!r} is unknown; did you mean {PRECISION!r}?")


def _refuse_deepspeed(given: dict[str, Any]) -> None:
    """Raise ValueError before the host imports a library that cannot run FP8 anyway."""
    strategy = given.get("strategy")
    if _asks_for_fp8(given) and isinstance(strategy, str) and strategy.startswith("deepspeed"):
        import_module("lightning_fp8.strategies").refuse_strategy("DeepSpeedStrategy")


def _replace(owner: type, name: str, wrapper: Any, original: Any) -> None:
    wrapper._fp8_original = original
    setattr(owner, name, wrapper)


def _for_host(plugin_module: str, given: Any) -> Any:
    """Replace our requests in `given`, an object or a list, by the class of `plugin_module`."""
    if isinstance(given, (list, tuple)):
        return [_for_host(plugin_module, one) for one in given]
    name = _class_of_ours(given)
    return given if name is None else given.for_host(getattr(import_module(plugin_module), name))


def _class_of_ours(given: Any) -> str | None:
    """Return the public class of which `given` is an instance; None if it is not ours."""
    for name, defined_in in REQUESTS.items():
        cls = getattr(sys.modules.get(defined_in), name, None)
        if cls is not None and isinstance(given, cls):
            return name
    return None


def _withdraw_choice(connector_module: ModuleType) -> None:
    """Remove ``fp8-mixed`` if it cannot be supported, so that the host refuses it."""
    literal = getattr(connector_module, "_PRECISION_INPUT_STR", None)
    if literal is not None:
        literal.__args__ = tuple(choice for choice in get_args(literal) if choice != PRECISION)
