"""The configuration: from the script, from ``TORCH_FP8_CONFIG``, or from Accelerate's own flags.

``accelerate launch`` exports every ``--fp8_*`` flag as ``ACCELERATE_FP8_*``, whether it was given
or not. So does ``fp8_config`` in a config file, with slightly different keys. A value equal to the
launcher's default therefore counts as not given.

| flag | here | launcher's default |
|---|---|---|
| ``--fp8_format E4M3`` | ``grad_format="e4m3"``; E5M2 is refused | HYBRID |
| ``--fp8_opt_level`` | ``opt_level`` | O2 |
| ``--fp8_amax_history_len``, ``--fp8_margin`` | the same, and ``recipe="delayed"`` | 1024, 0 |
| ``--fp8_amax_compute_algo max`` | the same, and ``recipe="delayed"`` | most_recent |
| ``--fp8_use_autocast_during_eval`` | ``eval_fp8=True``, the default here | not given |
| ``--fp8_override_linear_precision false,false,true`` | ``wgrad="bf16"``; others: refused | none |
| ``use_mxfp8_block_scaling`` (config file) | ``recipe="mxfp8"`` | false |
| ``--fp8_interval``, ``--fp8_pad_inner_dim`` | refused | 1, true |
| ``--fp8_enable_fsdp_float8_all_gather false`` | holds: weights are gathered as they are | true |

``fp8_config`` in a config file also takes each field of FP8Config under its own name (``recipe:
rowwise``), because Accelerate exports all of its keys.
"""

import ast
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from accelerate.utils import KwargsHandler

from torch_fp8 import FP8Config
from torch_fp8.config import given_config
from torch_fp8.quantization.options import read_json

CONFIG_VARIABLE = "TORCH_FP8_CONFIG"
_PREFIX = "ACCELERATE_FP8_"
_DELAYED = ("amax_history_len", "amax_compute_algo", "margin")


@dataclass(init=False)
class FP8Kwargs(KwargsHandler):
    """The kwargs handler that selects this engine and its configuration for one Accelerator.

    ``Accelerator(mixed_precision="fp8", kwargs_handlers=[FP8Kwargs(FP8Config(opt_level="O3"))])``

    ``FP8Kwargs(opt_level="O3")`` is a short form of the same handler. It overrides
    ``TORCH_FP8_CONFIG`` and the launcher's flags.

    Args:
        config: the configuration, or None for that of ``TORCH_FP8_CONFIG`` and the launcher's
            flags, as without a handler.
        options: fields of FP8Config instead of `config`.
    Raises:
        TypeError: `config` is not an FP8Config.
        ValueError: an option or value is not valid; both `config` and options are given.
    """

    config: FP8Config | None = None
    """The configuration, or None for that of ``TORCH_FP8_CONFIG`` and the launcher's flags."""

    def __init__(self, config: FP8Config | None = None, **options: Any) -> None:
        self.config = given_config(config, options, "FP8Kwargs")


class Flag(NamedTuple):
    """A flag that was given: its name and text for messages, and the option that it sets."""

    text: str
    value: Any


class _Meaning(NamedTuple):
    """The meaning of a launcher's variable, which is listed without its prefix.

    Attributes:
        flag: the user's name for it.
        default: the launcher's default, parsed.
        parse: the function from text to value.
        field: the field of FP8Config, or None if not supported.
        to_option: the function from the parsed value to the field's value.
        refusal: the reason why it is not supported.
    """

    flag: str
    default: Any
    parse: Callable[[str], Any]
    field: str | None = None
    to_option: Callable[[Any], Any] = lambda value: value
    refusal: str = ""


def resolve_config(explicit: FP8Config | None) -> tuple[FP8Config, list[str]]:
    """Return the configuration, and a line for each given option that is not applied.

    An explicit FP8Config overrides ``TORCH_FP8_CONFIG``, which overrides the launcher's flags
    option by option.

    Raises:
        ValueError: a flag is not supported, a value is invalid, or options contradict each other.
    """
    flags = given_flags()
    from_env = FP8Config.from_env()  # which validates its options
    environment = {} if from_env is None else read_json(os.environ[CONFIG_VARIABLE])
    notes = _unknown_keys()
    if explicit is not None:
        source = "the FP8Config in kwargs_handlers"
        notes += _overridden(flags, asdict(explicit), source)
        if from_env not in (None, explicit):
            notes.append(f"{CONFIG_VARIABLE} is not applied: {source} wins")
        return explicit, notes
    notes += _overridden(flags, environment, CONFIG_VARIABLE)
    options = {**{name: flag.value for name, flag in flags.items()}, **environment}
    if options.get("recipe", "auto") == "auto" and any(name in flags for name in _DELAYED):
        options["recipe"] = "delayed"
    try:
        return FP8Config(**options), notes
    except (ValueError, TypeError) as error:
        sources = [flag.text for flag in flags.values()]
        sources += [CONFIG_VARIABLE] if environment else []
        raise ValueError(f"{error} (given: {', '.join(sources)})") from error


def given_flags() -> dict[str, Flag]:
    """Return Accelerate's FP8 flags that differ from the launcher's defaults, by FP8Config field.

    Raises:
        ValueError: a flag is not supported, or one option is given two different values.
    """
    flags: dict[str, Flag] = {}
    for variable, meaning in _MEANINGS.items():
        text = os.environ.get(_PREFIX + variable)
        if text is None:
            continue
        try:
            value = meaning.parse(text)
        except ValueError as error:
            raise ValueError(f"{meaning.flag}={text!r} ({_PREFIX}{variable}): {error}") from error
        if value == meaning.default:
            continue
        if meaning.field is None:
            raise ValueError(
                f"{meaning.flag}={text} ({_PREFIX}{variable}) is not supported by the engine "
                f"torch_fp8: {meaning.refusal}. Leave it out, or use --fp8_backend to choose a "
                "backend that supports it"
            )
        flag = Flag(f"{meaning.flag}={text}", meaning.to_option(value))
        other = flags.setdefault(meaning.field, flag)
        if other.value != flag.value:
            raise ValueError(f"{other.text} and {flag.text} contradict each other")
    return flags


def _unknown_keys() -> list[str]:
    """Return a line for each key of ``fp8_config`` that neither Accelerate nor FP8Config has."""
    names = {key.removeprefix(_PREFIX) for key in os.environ if key.startswith(_PREFIX)}
    unknown = sorted(names - {*_MEANINGS, *_READ_ELSEWHERE})
    return [
        f"fp8_config.{name.lower()} ({_PREFIX}{name}) is not applied: FP8Config has no such field"
        for name in unknown
    ]


def _overridden(flags: Mapping[str, Flag], options: Mapping[str, Any], source: str) -> list[str]:
    return [
        f"{flag.text} is not applied: {source} says {name}={options[name]!r}"
        for name, flag in flags.items()
        if name in options and options[name] != flag.value
    ]


def _bool(text: str) -> bool:
    value = text.strip().lower()
    if value in ("1", "true", "yes", "y", "t", "on"):
        return True
    if value in ("0", "false", "no", "n", "f", "off", "none", ""):
        return False
    raise ValueError("expected true or false")


def _literal(text: str) -> Any:
    """Return the value that a config file had before Accelerate exported it as text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _format(text: str) -> str:
    value = text.upper()
    if value == "E5M2":
        raise ValueError(
            "no recipe of the engine torch_fp8 uses E5M2 in forward; the valid formats are HYBRID "
            "(E4M3 forward, gradients by recipe) and E4M3"
        )
    if value not in ("HYBRID", "E4M3"):
        raise ValueError("the valid formats are HYBRID and E4M3")
    return value


_HISTORY = _Meaning("--fp8_amax_history_len", 1024, int, "amax_history_len")
_ALGORITHM = _Meaning("--fp8_amax_compute_algo", "most_recent", str.lower, "amax_compute_algo")
_LEVEL = _Meaning("--fp8_opt_level", "O2", str.upper, "opt_level")
_OVERRIDE = "--fp8_override_linear_precision"
_HIGH_PRECISION = "keeping only {} in high precision is not supported; only wgrad can be"

_MEANINGS: dict[str, _Meaning] = {
    "FORMAT": _Meaning("--fp8_format", "HYBRID", _format, "grad_format", str.lower),
    "OPT_LEVEL": _LEVEL,
    "OPTIMIZATION_LEVEL": _LEVEL._replace(flag="fp8_config.optimization_level"),
    "AMAX_HISTORY_LEN": _HISTORY,
    "AMAX_HISTORY_LENGTH": _HISTORY._replace(flag="fp8_config.amax_history_length"),
    "AMAX_COMPUTE_ALGO": _ALGORITHM,
    "AMAX_COMPUTE_ALGORITHM": _ALGORITHM._replace(flag="fp8_config.amax_compute_algorithm"),
    "MARGIN": _Meaning("--fp8_margin", 0, int, "margin"),
    "USE_AUTOCAST_DURING_EVAL": _Meaning(
        "--fp8_use_autocast_during_eval", False, _bool, "eval_fp8"
    ),
    "USE_MXFP8_BLOCK_SCALING": _Meaning(
        "fp8_config.use_mxfp8_block_scaling", False, _bool, "recipe", lambda _: "mxfp8"
    ),
    "OVERRIDE_WGRAD": _Meaning(_OVERRIDE, False, _bool, "wgrad", lambda _: "bf16"),
    "OVERRIDE_FPROP": _Meaning(_OVERRIDE, False, _bool, refusal=_HIGH_PRECISION.format("fprop")),
    "OVERRIDE_DGRAD": _Meaning(_OVERRIDE, False, _bool, refusal=_HIGH_PRECISION.format("dgrad")),
    "INTERVAL": _Meaning("--fp8_interval", 1, int, refusal="scales are computed at every step"),
    "PAD_INNER_DIM": _Meaning(
        "--fp8_pad_inner_dim", True, _bool, refusal="sizes that need padding are always padded"
    ),
}
_READ_ELSEWHERE = ("BACKEND", "ENABLE_FSDP_FLOAT8_ALL_GATHER")
_MEANINGS |= {
    field.name.upper(): _Meaning(f"fp8_config.{field.name}", None, _literal, field.name)
    for field in fields(FP8Config)
    if field.name.upper() not in (*_MEANINGS, *_READ_ELSEWHERE)
}
