"""The names of the hosts that `lightning_fp8` and `accelerate_fp8` extend, in a single list.

Both packages read here what they wrap, and ``torch-fp8 env`` what must be present. This module
imports nothing, because the hosts are half imported when it is read.
"""

_CONNECTOR = {"__init__": "", "_check_and_init_precision": ""}
_FABRIC = {f"_Connector.{name}": "" for name in _CONNECTOR}
_TRAINER = {f"_AcceleratorConnector.{name}": "" for name in _CONNECTOR}
_CHOICES = {"_PRECISION_INPUT_STR": ""}
_ROLLOUTS = {
    "_generate_single_turn": "generate_single_turn",
    "_generate_and_score_completions": "generate_and_score_completions",
    "_get_per_token_logps_and_entropies": "per_token_logps",
    "compute_loss": "compute_loss",
    "log": "log",
}

POINTS: dict[str, dict[str, str]] = {
    "lightning.fabric.plugins.precision.precision": _CHOICES,
    "lightning.fabric.connector": _FABRIC,
    "lightning.pytorch.trainer.connectors.accelerator_connector": _TRAINER,
    "lightning_fabric.plugins.precision.precision": _CHOICES,
    "lightning_fabric.connector": _FABRIC,
    "pytorch_lightning.trainer.connectors.accelerator_connector": _TRAINER,
    "accelerate.utils.imports": {"is_fp8_available": ""},
    "accelerate.state": {
        "is_fp8_available": "",
        "check_cuda_fp8_capability": "",
        "AcceleratorState.__init__": "",
    },
    "accelerate.accelerator": {
        "Accelerator.__init__": "init",
        "Accelerator.prepare": "prepare",
        "Accelerator.prepare_model": "prepare_model",
        "Accelerator.prepare_optimizer": "prepare_optimizer",
        "Accelerator._prepare_fsdp2": "prepare_fsdp2",
        "Accelerator.unwrap_model": "unwrap_model",
        "Accelerator.get_state_dict": "get_state_dict",
        "Accelerator.save_model": "save_model",
        "Accelerator.backward": "backward",
        "Accelerator.clip_grad_norm_": "clip_grad_norm_",
        "Accelerator.clip_grad_value_": "clip_grad_value_",
        "Accelerator.fp8_backend": "",
    },
    "accelerate.commands.config.cluster": {"_ask_options": "", "is_fp8_available": ""},
    "transformers.training_args": {"TrainingArguments.__post_init__": "post_init"},
    "transformers.generation.utils": {"GenerationMixin.generate": "generate"},
    "transformers.modeling_utils": {"PreTrainedModel.save_pretrained": "save_pretrained"},
    "transformers.trainer": {
        "Trainer.create_accelerator_and_postprocess": "create_accelerator",
        "Trainer._save_optimizer_and_scheduler": "save_optimizer_and_scheduler",
        "Trainer._load_optimizer_and_scheduler": "load_optimizer_and_scheduler",
        "Trainer._wrap_model": "wrap_model",
        "Trainer._save": "save",
    },
    "trl.models.utils": {"prepare_fsdp": "prepare_fsdp"},
    "trl.generation.vllm_generation": {"VLLMGeneration.sync_weights": "sync_weights"},
    **{
        f"trl.trainer.{name.lower()}_trainer": {
            "prepare_fsdp": "",
            **{f"{name}Trainer.{method}": ours for method, ours in _ROLLOUTS.items()},
        }
        for name in ("GRPO", "RLOO")
    },
}
"""The dotted names in each module, each with our function that replaces it and receives the
original; empty if a name is a copy or is extended in another way.
"""


def wrapped(module: str) -> dict[str, str]:
    """Return the names in a module that our functions replace."""
    return {name: ours for name, ours in POINTS[module].items() if ours}
