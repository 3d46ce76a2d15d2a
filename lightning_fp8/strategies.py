"""The strategies that cannot run with the plugin, with an alternative for each.

They are matched by name, because a strategy's module may not be importable if it is not used.
"""

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


def refuse_strategy(name: str) -> None:
    """Raise ValueError if strategies of the class `name` cannot run FP8 layers."""
    if name in _REFUSED:
        raise ValueError(f"precision='fp8-mixed' does not run under {name}: {_REFUSED[name]}")
