"""A trial's checkpoints, trackers and uploads: into the folder of the trial, or nowhere.

What the hosts and the usual functions write is redirected. Python's audit hook sees every other
file that is opened for writing, and the report lists its folder.
"""

import inspect
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch

from torch_fp8_tools.compare.child import note, recorder, wrap
from torch_fp8_tools.compare.trial import OUTPUTS, Trial

TRACKERS = {
    "WANDB_MODE": "disabled",
    "WANDB_DISABLED": "true",
    "COMET_MODE": "DISABLED",
    "COMET_START_ONLINE": "0",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled",
    "DVCLIVE_TEST": "true",
    "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false",
}
"""The variables that switch trackers off, and their values."""
_UPLOADS = ("create_repo", "upload_file", "upload_folder", "upload_large_folder", "create_commit")
_MOST_FOLDERS = 20


def begin(trial: Trial) -> None:
    """Switch trackers off, and redirect ``torch.save``; called once in each process."""
    os.environ.update(TRACKERS)
    os.environ["MLFLOW_TRACKING_URI"] = (Path(trial.folder) / "mlruns").as_uri()
    wrap(torch, "save", _save_second)
    wrap(torch.serialization, "save", _save_second)
    _watch_files(trial)


def redirected(path: Any, what: str) -> Any:
    """Return the path in the trial's folder for one of the program's; an open file stays."""
    if path is None or hasattr(path, "write"):
        return path
    folder = Path(recorder().trial.folder) / OUTPUTS
    given = Path(os.fspath(path)).expanduser().absolute()
    if given == folder or folder in given.parents or _is_scratch(given):
        return path
    note(f"{what} to {given} went to the trial's folder")
    target = folder.joinpath(*given.parts[-2:])
    target.parent.mkdir(parents=True, exist_ok=True)
    return str(target)


def _save_second(original: Any, obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
    return original(obj, redirected(f, "torch.save"), *args, **kwargs)


def _to_argument(name: str, what: str) -> Any:
    """Return a wrapper that redirects the argument `name`."""

    def wrapper(original: Any, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(*args, **kwargs)
        if bound.arguments.get(name) is not None:
            bound.arguments[name] = redirected(bound.arguments[name], what)
        return original(*bound.args, **bound.kwargs)

    return wrapper


def _nothing(what: str) -> Any:
    def wrapper(original: Any, *args: Any, **kwargs: Any) -> Any:
        note(f"{what} was left out")
        return types.SimpleNamespace(repo_id=kwargs.get("repo_id"), repo_url="")

    return wrapper


def extend_saving(module: Any) -> None:
    """Redirect ``save_pretrained`` and safetensors, and drop uploads to a hub."""
    for cls in [c for c in vars(module).values() if isinstance(c, type)]:
        if cls.__module__ != module.__name__:
            continue
        wrap(cls, "save_pretrained", _to_argument("save_directory", "save_pretrained"))
        wrap(cls, "push_to_hub", _nothing("push_to_hub"))
        if cls.__name__ == "HfApi":
            for name in _UPLOADS:
                wrap(cls, name, _nothing(f"HfApi.{name}"))
                if name in vars(module):  # a bound method, copied before
                    setattr(module, name, getattr(module.api, name))
    if module.__name__ == "safetensors.torch":
        wrap(module, "save_file", _to_argument("filename", "safetensors.save_file"))
        wrap(module, "save_model", _to_argument("filename", "safetensors.save_model"))


def extend_arguments(module: Any) -> None:
    """Give transformers' arguments the trial's folder, no tracker and no hub."""
    wrap(module.TrainingArguments, "__post_init__", _arguments)


def _arguments(original: Any, self: Any) -> None:
    self.output_dir = redirected(
        self.output_dir or "trainer_output", "TrainingArguments.output_dir"
    )
    if getattr(self, "logging_dir", None):
        self.logging_dir = redirected(self.logging_dir, "TrainingArguments.logging_dir")
    if self.report_to not in (None, "none", [], ["none"]):
        self.report_to = "none"
    if self.push_to_hub:
        note("TrainingArguments(push_to_hub=True) was left out")
        self.push_to_hub = False
    original(self)


def extend_trainer(module: Any) -> None:
    """Redirect ``Trainer.save_model``, drop checkpoints, and record evaluations."""
    from torch_fp8_tools.compare.host_precision import extend_evaluate

    extend_evaluate(module)
    wrap(module.Trainer, "save_model", _to_argument("output_dir", "Trainer.save_model"))
    wrap(module.Trainer, "_save_checkpoint", _nothing("a checkpoint of the Trainer"))


def extend_accelerator(module: Any) -> None:
    """Redirect what an Accelerator saves, and drop its trackers."""
    cls = module.Accelerator
    wrap(cls, "__init__", _init_accelerator)
    wrap(cls, "save_state", _to_argument("output_dir", "Accelerator.save_state"))
    wrap(cls, "save_model", _to_argument("save_directory", "Accelerator.save_model"))


def _init_accelerator(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    if bound.arguments.pop("log_with", None) is not None:
        note("Accelerator(log_with=...) was left out")
    for name in ("project_dir", "logging_dir"):
        if bound.arguments.get(name) is not None:
            bound.arguments[name] = redirected(bound.arguments[name], f"Accelerator.{name}")
    configuration = bound.arguments.get("project_config")
    for name in ("project_dir", "logging_dir"):
        if getattr(configuration, name, None) is not None:
            setattr(configuration, name, redirected(getattr(configuration, name), name))
    original(*bound.args, **bound.kwargs)


def extend_lightning(module: Any) -> None:
    """Redirect what a Trainer or Fabric saves, and replace the loggers that the program creates."""
    cls = getattr(module, "Trainer", None)
    if cls is None:
        wrap(module.Fabric, "__init__", _init_lightning)
        wrap(module.Fabric, "save", _to_argument("path", "Fabric.save"))
        return
    wrap(cls, "__init__", _init_lightning)
    wrap(cls, "save_checkpoint", _nothing("a checkpoint of the Trainer"))


def _init_lightning(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    if hasattr(self, "fit"):
        root = kwargs.get("default_root_dir")
        folder = Path(recorder().trial.folder) / OUTPUTS
        kwargs["default_root_dir"] = redirected(root, "default_root_dir") if root else str(folder)
        if kwargs.get("logger") not in (None, True, False):
            package = _base(self).__module__.removesuffix("trainer.trainer")
            kwargs["logger"] = sys.modules[f"{package}loggers.logger"].DummyLogger()
            note("the Trainer's loggers were left out")
        callbacks = kwargs.get("callbacks") or []
        for callback in callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]:
            if getattr(callback, "dirpath", None):
                callback.dirpath = redirected(callback.dirpath, type(callback).__name__)
    elif kwargs.get("loggers"):
        kwargs["loggers"] = None
        note("Fabric's loggers were left out")
    original(self, *args, **kwargs)


def _base(trainer: Any) -> type:
    """Return Lightning's own class of a Trainer that the program may have derived from."""
    return next(c for c in type(trainer).__mro__ if c.__module__.endswith("trainer.trainer"))


def _is_scratch(path: Path) -> bool:
    """Return whether a path is no output: a device, a cache or a temporary file."""
    parts = set(path.parts)
    if parts & {"dev", "proc", "sys"} & set(path.parts[1:2]):
        return True
    if any("cache" in part.lower() or part == ".triton" for part in parts):
        return True
    scratch = [tempfile.gettempdir(), os.environ.get("TORCHINDUCTOR_CACHE_DIR")]
    scratch += [os.environ.get(name) for name in ("HF_HOME", "TRITON_CACHE_DIR", "TMPDIR")]
    roots = [Path(root).absolute() for root in scratch if root]
    inside = [root for root in roots if root == path or root in path.parents]
    # The user's own folders may lie below the temporary folder.
    return bool(inside) and Path.cwd() not in (path, *path.parents)


def _watch_files(trial: Trial) -> None:
    """Note the folders of files that are opened for writing outside of the trial's folder."""
    root, seen = Path(trial.folder).absolute(), set[Path]()

    def opened(event: str, arguments: Any) -> None:
        if event != "open" or len(seen) >= _MOST_FOLDERS:
            return
        path, mode, flags = arguments
        writes = bool(mode and set(mode) & set("wax+"))
        if not mode and isinstance(flags, int):
            writes = bool(flags & (os.O_WRONLY | os.O_RDWR))
        if not writes or not isinstance(path, (str, bytes)):
            return
        folder = Path(os.fsdecode(path)).absolute().parent
        if os.path.isdir(path):
            return  # of a temporary file without a name
        if folder in seen or root == folder or root in folder.parents or _is_scratch(folder):
            return
        if folder.name == "__pycache__":
            return
        seen.add(folder)
        note(f"not redirected: the program writes {Path(os.fsdecode(path)).name} in {folder}")

    sys.addaudithook(opened)
