"""The extension points in Lightning; `_fp8_autoload` calls `extend` with the imported module.

Lightning is published twice, as ``lightning`` (with ``lightning.fabric`` and ``lightning.pytorch``)
and as ``lightning_fabric`` and ``pytorch_lightning``: two full copies of the code with separate
classes. The two connectors, which turn ``precision`` and ``plugins`` into a precision plugin, are
extended in each, and so are the choices of ``precision``. The rest uses Lightning's Precision
interface.

`extend` may be called twice. If an upstream name has moved, it raises AttributeError, and the host
works as without this package.
"""

from importlib import import_module
from typing import Any, get_args

from _fp8_points import refusal, refuse_when, wrap

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


class Request:
    """A user's object, which a connector replaces by an object for its own copy of Lightning.

    Its subclasses `FP8Precision` and `FP8FSDPStrategy` are public. The modules of `PLUGINS` have
    subclasses of these, under the same names.

    Attributes:
        request: the keyword arguments of both.
        attach: a plugin's method that attaches it to a strategy.
        is_of_host: whether the object belongs to a copy.
    """

    request: Any
    attach: Any
    is_of_host = False

    def for_host(self, plugin_module: str) -> Any:
        """Return this request as an object of a host's class, or itself if it already is one.

        Args:
            plugin_module: the module with the host's class.
        Raises:
            TypeError: the object is of a class that the user derived from ours.
        """
        public = next(cls for cls in type(self).__mro__ if Request in cls.__bases__)
        cls = getattr(import_module(plugin_module), public.__name__)
        if isinstance(self, cls):
            return self
        if type(self).__base__ is not Request and not self.is_of_host:
            raise TypeError(
                f"{type(self).__name__} derives from lightning_fp8.{cls.__name__}, which only "
                f"holds options; derive from {cls.__module__}.{cls.__name__}"
            )
        return cls(**self.request)


def extend(module: Any) -> None:
    """Make the connector of Fabric or of the Trainer accept ``fp8-mixed`` and `FP8Precision`."""
    # All modules that copy this type share one object, so it is changed in place.
    literal = module._PRECISION_INPUT_STR
    choices = tuple(choice for choice in get_args(literal) if choice != PRECISION)
    literal.__args__ = choices  # the host refuses the flag if a name has moved
    too_old = refusal(module.__name__.partition(".")[0])
    if too_old is None:
        wrap(module, __name__, lambda *_: True)
    else:
        refuse_when(lambda _, args, kwargs: _asks_for_fp8(kwargs), module, too_old)
    literal.__args__ = (*choices, PRECISION)


def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Extend a connector's ``__init__``: replace our requests, and refuse early what cannot run."""
    # The environment may have requested FP8 after torch was imported.
    import_module("_fp8_autoload").load("lightning_fp8")
    for name in {"plugins", "strategy"} & kwargs.keys():
        kwargs[name] = _for_host(PLUGINS[original.__module__], kwargs[name])
    precision = kwargs.get("precision")
    text = precision.lower().replace("-", "").replace("_", "") if isinstance(precision, str) else ""
    if text in _NEARLY and precision != PRECISION:
        raise ValueError(f"precision={precision!r} is unknown; did you mean {PRECISION!r}?")
    strategy = kwargs.get("strategy")
    if isinstance(strategy, str) and strategy.startswith("deepspeed") and _asks_for_fp8(kwargs):
        # Before the host imports a library that cannot run FP8 anyway.
        refuse_strategy("DeepSpeedStrategy")
    original(self, *args, **kwargs)


def check_and_init_precision(original: Any, self: Any) -> Any:
    """Extend a connector's ``_check_and_init_precision``: return our plugin if it is requested."""
    own, plugin_module = vars(self), PLUGINS[original.__module__]
    # Fabric's and the Trainer's attributes for the user's plugin and the precision.
    plugin = own.get("_precision_instance") or own.get("_precision_plugin_flag")
    if plugin is None and PRECISION in (own.get("_precision_input"), own.get("_precision_flag")):
        plugin = import_module(plugin_module).FP8Precision()
    plugin = _for_host(plugin_module, plugin)
    if not isinstance(plugin, Request):
        if isinstance(self.strategy, Request):
            raise ValueError(
                "FP8FSDPStrategy only supports FP8: set precision='fp8-mixed' or "
                "plugins=[FP8Precision(...)]; without FP8 use ModelParallelStrategy"
            )
        return original(self)
    plugin.attach(self.strategy, self.accelerator)
    return plugin


def _asks_for_fp8(given: dict[str, Any]) -> bool:
    """Return whether a host's arguments request FP8 by the flag, the plugin or the strategy."""
    plugins = given.get("plugins")
    listed = plugins if isinstance(plugins, list) else [plugins]
    ours = any(isinstance(each, Request) for each in [*listed, given.get("strategy")])
    return ours or given.get("precision") == PRECISION


def _for_host(plugin_module: str, given: Any) -> Any:
    """Replace our requests in `given`, an object or a list, by the class of `plugin_module`."""
    if isinstance(given, (list, tuple)):
        return [_for_host(plugin_module, one) for one in given]
    return given.for_host(plugin_module) if isinstance(given, Request) else given


_MODEL_PARALLEL = "use ModelParallelStrategy (FSDP2) instead"
_NEEDS_CUDA = "FP8 needs a CUDA device"
_REFUSED = {
    "FSDPStrategy": _MODEL_PARALLEL,
    "DeepSpeedStrategy": _MODEL_PARALLEL,
    "MegatronStrategy": _MODEL_PARALLEL,
    "DataParallelStrategy": "use strategy='ddp' instead",
    "XLAStrategy": _NEEDS_CUDA,
    "XLAFSDPStrategy": _NEEDS_CUDA,
    "SingleDeviceXLAStrategy": _NEEDS_CUDA,
}
"""The strategies that cannot run FP8 layers, with what to do instead.

They are matched by name, because the module of an unused strategy may not be importable.
"""


def refuse_strategy(name: str) -> None:
    """Raise ValueError if strategies of the class `name` cannot run FP8 layers."""
    if name in _REFUSED:
        raise ValueError(f"precision='fp8-mixed' does not run under {name}: {_REFUSED[name]}")
