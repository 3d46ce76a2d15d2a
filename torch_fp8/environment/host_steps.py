"""One training step at each level through each host, with a tiny model.

The check is based on the state after a step, not on the host's messages: converted layers were
called, and between backward and the optimizer's step weights and gradients have the form that the
level gives them. Hosts are imported by name when a step starts; the flag does the rest.
"""

import os
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from torch_fp8.config import ENV_VAR, FP8Config
from torch_fp8.environment.check import run_parts
from torch_fp8.environment.hosts import is_installed
from torch_fp8.environment.recipes import device_at_hand
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.ops.hardware import runs_natively
from torch_fp8.tensor.dtensor import local
from torch_fp8.tensor.float8_grad import Float8Grad
from torch_fp8.tensor.split_weight import stored

_FLAG, _LAUNCHED = "fp8-mixed", "ACCELERATE_MIXED_PRECISION"
LEVELS = ("O1", "O2", "O3")
FEATURES, TOKENS, VOCABULARY = 64, 32, 64


class Evidence:
    """Observations of a model during training.

    Attributes:
        calls: the number of forwards of converted layers.
        states: the dtype of each weight before the optimizer steps, and whether its gradient is
            8-bit.
        before: the values of those weights at that time.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.states: list[tuple[torch.dtype, bool]] = []
        self.before: list[tuple[nn.Parameter, Tensor]] = []
        self._hook = nn.modules.module.register_module_forward_hook(self._count)

    def _count(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.calls += isinstance(module, Float8Layer)

    def look(self, model: nn.Module) -> None:
        """Observe the model between backward and the optimizer's step."""
        for module in model.modules():
            if isinstance(module, Float8Layer):
                weight = module.weight
                is_fp8 = isinstance(local(weight.grad), Float8Grad)
                self.states.append((stored(local(weight)).dtype, is_fp8))
                self.before.append((weight, weight.detach().clone()))

    def verdict(self, level: str, loss: float) -> str:
        """Raise unless this was a step of `level`."""
        self._hook.remove()
        if not self.calls or not self.states:
            raise RuntimeError("no FP8 layer took part: the flag has no effect")
        wanted = (torch.float32 if level == "O1" else torch.bfloat16, level == "O3")
        if set(self.states) != {wanted}:
            kinds = sorted({f"{dtype}, 8-bit gradient: {is_fp8}" for dtype, is_fp8 in self.states})
            raise RuntimeError(f"weights at level {level} have the wrong kind: {'; '.join(kinds)}")
        if not torch.tensor(loss).isfinite():
            raise RuntimeError(f"the loss is {loss}")
        # A host may have moved the model back to the CPU.
        if all(torch.equal(weight.float().cpu(), old.float().cpu()) for weight, old in self.before):
            raise RuntimeError("no weight has changed")
        return f"{len(self.states)} FP8 layers, loss {loss:.3f}"


def steps(host: str) -> str:
    """Run a step of each level through one of the hosts in `STEPS`."""
    return run_parts({level: partial(step, host, level) for level in LEVELS})


def step(host: str, level: str) -> str:
    """Run one step of a level through one of the hosts in `STEPS`; return a description."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        evidence = Evidence()
        return evidence.verdict(level, run(host, level, evidence, folder))


def run(host: str, level: str, evidence: Evidence, folder: str) -> float:
    """Return the loss of one step with the host's flag and options of the environment."""
    emulate = not runs_natively(device_at_hand(), "tensorwise")
    config = FP8Config(opt_level=level, recipe="tensorwise", emulate=emulate)
    variables = {ENV_VAR: config.to_json(), _LAUNCHED: "fp8"}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        return STEPS[host](evidence, folder)
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


def _network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 2 * FEATURES), nn.GELU(), nn.Linear(2 * FEATURES, FEATURES)
    )


def _batch(device: torch.device | str = "cpu") -> Tensor:
    return torch.randn(TOKENS, FEATURES, device=device)


def _lightning_trainer(evidence: Evidence, folder: str) -> float:
    lightning = import_module("lightning.pytorch" if _unified() else "pytorch_lightning")
    losses: list[float] = []

    class Regression(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.network = _network()

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss = (self.network(batch) - batch).float().square().mean()
            losses.append(loss.item())
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            evidence.look(self)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    data = torch.utils.data.DataLoader(_batch(), batch_size=TOKENS)
    trainer = lightning.Trainer(
        accelerator="gpu" if device_at_hand().type == "cuda" else "cpu",
        devices=1,
        max_steps=1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        precision=_FLAG,
    )
    trainer.fit(Regression(), data)
    return losses[-1]


def _fabric(evidence: Evidence, folder: str) -> float:
    lightning = import_module("lightning.fabric" if _unified() else "lightning_fabric")
    fabric = lightning.Fabric(
        accelerator="gpu" if device_at_hand().type == "cuda" else "cpu",
        devices=1,
        precision=_FLAG,
    )
    fabric.launch()
    model = _network()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return _loop(model, optimizer, fabric.backward, evidence, fabric.device)


def _accelerate(evidence: Evidence, folder: str) -> float:
    accelerate = import_module("accelerate")
    on_cpu = device_at_hand().type == "cpu"
    accelerator = accelerate.Accelerator(mixed_precision="fp8", cpu=on_cpu)
    model = _network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    return _loop(model, optimizer, accelerator.backward, evidence, accelerator.device)


def _loop(
    model: nn.Module,
    optimizer: Any,
    backward: Callable[[Tensor], None],
    evidence: Evidence,
    device: torch.device,
) -> float:
    batch = _batch(device)
    loss = (model(batch) - batch).float().square().mean()
    backward(loss)
    evidence.look(model)
    optimizer.step()
    return loss.item()


def _transformers(evidence: Evidence, folder: str) -> float:
    transformers = import_module("transformers")
    arguments = _launched(transformers.TrainingArguments, folder)
    rows = [{"input_ids": row, "labels": row} for row in _tokens()]
    trainer = transformers.Trainer(_llama(), arguments, train_dataset=rows)
    return _train(trainer, evidence)


def _trl(evidence: Evidence, folder: str) -> float:
    trl, datasets = import_module("trl"), import_module("datasets")
    arguments = _launched(trl.SFTConfig, folder, dataset_kwargs={"skip_prepare_dataset": True})
    rows = datasets.Dataset.from_dict({"input_ids": _tokens()})
    trainer = trl.SFTTrainer(
        _llama(), args=arguments, train_dataset=rows, processing_class=_tokenizer()
    )
    return _train(trainer, evidence)


def _launched(arguments: Any, folder: str, **options: Any) -> Any:
    """Create a host's training arguments as under ``accelerate launch --mixed_precision fp8``."""
    return arguments(
        output_dir=folder,
        max_steps=1,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        use_cpu=device_at_hand().type == "cpu",
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )


def _train(trainer: Any, evidence: Evidence) -> float:
    base = import_module("transformers").TrainerCallback

    class Look(base):  # type: ignore[misc,valid-type]
        def on_pre_optimizer_step(self, *arguments: Any, model: nn.Module, **others: Any) -> None:
            evidence.look(model)

    trainer.add_callback(Look())
    return float(trainer.train().training_loss)


def _llama() -> nn.Module:
    transformers = import_module("transformers")
    config = transformers.LlamaConfig(
        hidden_size=FEATURES,
        intermediate_size=2 * FEATURES,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model.float()


def _tokens() -> list[list[int]]:
    rows: list[list[int]] = torch.randint(3, VOCABULARY, (4, TOKENS)).tolist()
    return rows


def _tokenizer() -> Any:
    transformers, tokenizers = import_module("transformers"), import_module("tokenizers")
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    model = tokenizers.models.WordLevel(words, unk_token="<unk>")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model),
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
    )


def _unified() -> bool:
    return is_installed("lightning")


STEPS: dict[str, Callable[[Evidence, str], float]] = {
    "Lightning Trainer": _lightning_trainer,
    "Lightning Fabric": _fabric,
    "Accelerate": _accelerate,
    "transformers Trainer": _transformers,
    "TRL SFT": _trl,
}
