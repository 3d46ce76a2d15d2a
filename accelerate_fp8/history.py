"""The scaling state (delayed scaling's history) in checkpoint folders, as a small separate file.

The weights' own files remain those that stock libraries write and read. Each process has its own
file, because each sees other activations. If more processes resume than there are files, the
additional ones use the first file.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import safetensors.torch
from accelerate.logging import get_logger
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn

from torch_fp8 import load_scaling_state_dict, scaling_state_dict
from torch_fp8.checkpoint.files import whole_file

_NAME = "fp8_scaling_{}.safetensors"


def save_history(models: Sequence[nn.Module], directory: str | Path, process_index: int) -> None:
    """Write the histories of `models`, if they have any, in one atomic step.

    Args:
        models: the models; keys are their position and the layer's qualified name.
        directory: the folder of the checkpoint.
        process_index: the index of this process among all.
    """
    state = {f"{i}.{key}": value for i, own in _states(models) for key, value in own.items()}
    path = Path(directory) / _NAME.format(process_index)
    if not state:
        path.unlink(missing_ok=True)  # left by an earlier run in the same folder
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as partial:
        safetensors.torch.save_file(state, partial)


def load_history(models: Sequence[nn.Module], directory: str | Path, process_index: int) -> None:
    """Restore the result of `save_history`; without a file, histories start empty.

    Raises:
        ValueError: the file belongs to other models or another history length.
    """
    path = Path(directory) / _NAME.format(process_index)
    if not path.is_file():
        path = path.with_name(_NAME.format(0))
    if not path.is_file():
        if any("amax_history" in key for _, state in _states(models) for key in state):
            get_logger("accelerate_fp8").info(
                f"FP8: {directory} holds no amax history; delayed scaling starts with an empty one"
            )
        return
    state = safetensors.torch.load_file(path)
    for i, model in enumerate(models):
        prefix = f"{i}."
        own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        load_scaling_state_dict(_unwrap(model), own)


def _states(models: Sequence[nn.Module]) -> Iterator[tuple[int, dict[str, Tensor]]]:
    return enumerate(scaling_state_dict(_unwrap(model)) for model in models)


def _unwrap(model: nn.Module) -> nn.Module:
    return extract_model_from_parallel(model, keep_torch_compile=False)
