"""A few training steps of a causal language model, through Lightning's Trainer or Accelerate.

Random weights, learnable tokens (a bigram chain with noise), AdamW, no checkpoint, no logger. Steps
are not synchronized with the GPU: events are recorded between their phases and read at the end.
"""

import itertools
import os
import time
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from accelerate_fp8 import FP8Kwargs
from benchmarks import kernels, peers
from benchmarks.card import synchronize
from benchmarks.measurement import COMPILER
from lightning_fp8 import FP8Precision
from torch_fp8 import Float8Linear, FP8Config

WARMUP_STEPS = 3
"""The warm-up steps of each run: compilation, allocator and optimizer state."""
LEARNING_RATE = 3e-4
CHAIN_TOKENS, CHAIN_NOISE = 1024, 0.1
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Variant:
    """A model and optimizer to train with.

    Attributes:
        precision: ``bf16-mixed``, ``bf16-true`` or ``fp8-mixed``.
        config: fields of `FP8Config` that differ from the default.
        peer: library and recipe of the linears, a key of `benchmarks.peers`: ``torchao rowwise``.
        optimizer: ``AdamW`` (fused on a GPU) or one of `peers.TORCHAO_OPTIMIZERS`.
        optimizer_bytes: bytes that its step moves per parameter: weight and states twice,
            gradient once.
        lora: rank of adapters of all linear layers, or 0 to train all weights.
        apart: whether layers that read one input have separate products.
    """

    precision: str
    config: dict[str, Any] = field(default_factory=dict)
    peer: str = ""
    optimizer: str = "AdamW"
    optimizer_bytes: float = 28.0
    lora: int = 0
    apart: bool = False


class Marks:
    """The times at which the phases of steps began: CUDA events, or the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._steps: list[dict[str, Any]] = []

    def begin(self) -> None:
        """Note that a step begins."""
        self._steps.append({})
        self.end("begin")

    def end(self, phase: str) -> None:
        """Note that a phase of the step ends."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._steps[-1][phase] = event
        else:
            self._steps[-1][phase] = time.perf_counter()

    def milliseconds(self) -> list[dict[str, float]]:
        """Return the times of each step after the warm-up: its phases, and the whole to the next
        one's start.
        """
        synchronize(self.device)
        found = []
        for step, following in itertools.pairwise(self._steps[WARMUP_STEPS:]):
            points = [step["begin"], *(step[phase] for phase in PHASES)]
            phases = [self._between(*pair) for pair in itertools.pairwise(points)]
            whole = self._between(step["begin"], following["begin"])
            found.append(dict(zip(PHASES, phases, strict=True)) | {"step": whole})
        return found

    def _between(self, start: Any, end: Any) -> float:
        if self.device.type == "cuda":
            return float(start.elapsed_time(end))
        return (end - start) * 1e3


@dataclass
class Run:
    """The results of a few steps; memory in MiB, 0 on the CPU.

    Attributes:
        milliseconds: times of each measured step.
        losses: loss of every step.
        peak_mib: peak of the steps after the warm-up.
        run_peak_mib: peak of everything, including the set-up.
        num_fp8_linears: number of our linears.
        recipe: recipe of these layers, ``auto``'s choice if none was set, or empty.
        kernels: rows of the last step, which is not measured; see `benchmarks.kernels.COLUMNS`.
    """

    milliseconds: list[dict[str, float]]
    losses: list[float]
    peak_mib: float
    run_peak_mib: float
    num_fp8_linears: int
    recipe: str = ""
    kernels: list[dict[str, object]] = field(default_factory=list)


class _Recorder:
    """A recorder of a run of some steps while it goes on."""

    def __init__(self, device: torch.device, steps: int) -> None:
        self.device, self.marks, self.steps = device, Marks(device), steps
        self.profile = kernels.profiler(device)
        self.losses: list[Tensor] = []
        self.recipes: list[str] = []
        self._peaks: list[float] = []
        self._reset()

    def begin(self) -> None:
        if len(self.losses) == WARMUP_STEPS:
            self._note_peak()
            self._reset()
        self.marks.begin()
        if len(self.losses) == self.steps - 1:
            synchronize(self.device)
            self.profile.start()

    def finish(self, loss: Tensor, model: nn.Module) -> None:
        self.marks.end("optimizer")
        self.losses.append(loss.detach())
        if len(self.losses) == 1:
            linears = [m for m in model.modules() if isinstance(m, Float8Linear)]
            self.recipes = [m.fp8.recipe.name for m in linears]

    def close(self) -> None:
        """Stop recording after the last step."""
        synchronize(self.device)
        self.profile.stop()
        self._note_peak()

    def result(self) -> Run:
        milliseconds = self.marks.milliseconds()
        losses = [float(loss) for loss in self.losses]
        peaks = self._peaks[-1], max(self._peaks)
        names = ", ".join(dict.fromkeys(self.recipes))
        rows = kernels.rows_of(self.profile, self.device)
        return Run(milliseconds, losses, *peaks, len(self.recipes), names, rows)

    def _note_peak(self) -> None:
        on_gpu = self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.device) / 2**20 if on_gpu else 0.0
        self._peaks.append(peak)

    def _reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)


def bigram_tokens(sequences: int, length: int, vocabulary: int) -> Tensor:
    """Return (sequences, length) int64 in which each token determines the next, except for
    noise.
    """
    size = min(CHAIN_TOKENS, vocabulary)
    generator = torch.Generator().manual_seed(0)
    follower = torch.randperm(size, generator=generator)
    noise = torch.randint(size, (sequences, length), generator=generator)
    noisy = torch.rand(sequences, length, generator=generator) < CHAIN_NOISE
    tokens = noise.clone()
    for i in range(1, length):
        tokens[:, i] = torch.where(noisy[:, i], noise[:, i], follower[tokens[:, i - 1]])
    return tokens


def causal_lm(layout: dict[str, Any], variant: Variant, device: torch.device) -> nn.Module:
    """Return a model of random float32 weights, its linears converted where a peer is to run."""
    torch.manual_seed(0)
    with device:  # a billion random numbers take a minute on a CPU
        model = LlamaForCausalLM(LlamaConfig(**layout, attn_implementation="sdpa")).train()
    name, _, recipe = variant.peer.rpartition(" ")
    if name == "torchao":
        return peers.torchao(model, recipe)
    if name == "Transformer Engine":
        return peers.TransformerEngine(model, recipe)
    if variant.lora:
        import peft

        return peft.get_peft_model(
            model, peft.LoraConfig(r=variant.lora, target_modules="all-linear")
        )
    return model


def optimizer_of(variant: Variant, parameters: Any, device: torch.device) -> torch.optim.Optimizer:
    """Return the variant's AdamW."""
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    if variant.optimizer == "AdamW":
        fused = device.type == "cuda"
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=fused)
    return peers.torchao_optimizer(variant.optimizer, parameters, lr=LEARNING_RATE)


def compile_layers(model: nn.Module) -> None:
    """Compile each decoder layer; call it after the conversion."""
    for module in model.modules():
        if type(module).__name__ == "LlamaDecoderLayer":
            module.compile(backend=COMPILER)


class CausalLM(lightning.LightningModule):
    """The LightningModule that is trained."""

    def __init__(self, model: nn.Module, variant: Variant, compiled: bool) -> None:
        super().__init__()
        self.model, self.variant, self.compiled = model, variant, compiled

    def on_train_start(self) -> None:
        """Compile the layers, which the precision plugin has converted by now."""
        if self.compiled:
            compile_layers(self.model)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (tokens,) = batch
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        device = next(self.parameters()).device
        return optimizer_of(self.variant, self.parameters(), device)

    def cpu(self) -> "CausalLM":
        """Return self, so that Lightning does not copy the model at the end of a fit."""
        return self


class _RecordingCallback(Callback):
    def __init__(self, recorder: _Recorder) -> None:
        self.recorder = recorder

    def on_train_batch_start(self, *_: Any) -> None:
        self.recorder.begin()

    def on_before_backward(self, *_: Any) -> None:
        self.recorder.marks.end("forward")

    def on_after_backward(self, *_: Any) -> None:
        self.recorder.marks.end("backward")

    def on_train_batch_end(self, trainer, module, outputs, *_: Any) -> None:
        self.recorder.finish(outputs["loss"], module)

    def on_train_end(self, trainer, *_: Any) -> None:
        self.recorder.close()
        self._drop(trainer)

    def on_exception(self, trainer, *_: Any) -> None:
        self._drop(trainer)

    @staticmethod
    def _drop(trainer: lightning.Trainer) -> None:
        # Lightning would copy states to the CPU, tens of gigabytes.
        for optimizer in trainer.optimizers:
            optimizer.state.clear()


def run_lightning(
    variant: Variant,
    compiled: bool,
    layout: dict[str, Any],
    tokens: Tensor,
    batch: int,
    device: torch.device,
) -> Run:
    """Run steps of a fresh model through Lightning's Trainer.

    Args:
        variant: the variant to train.
        compiled: whether decoder layers are compiled.
        layout: arguments of transformers.LlamaConfig.
        tokens: (steps * batch, sequence).
        batch: sequences per step.
        device: where.
    """
    recorder = _Recorder(device, len(tokens) // batch)
    module = CausalLM(causal_lm(layout, variant, device), variant, compiled)
    precision: dict[str, Any] = {"precision": variant.precision}
    if variant.config:
        precision = {"plugins": [FP8Precision(FP8Config(**variant.config))]}
    trainer = lightning.Trainer(
        **precision,
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        max_steps=len(tokens) // batch,
        callbacks=[_RecordingCallback(recorder)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(tokens), batch_size=batch))
    return recorder.result()


def run_accelerate(
    variant: Variant,
    compiled: bool,
    layout: dict[str, Any],
    tokens: Tensor,
    batch: int,
    device: torch.device,
) -> Run:
    """Run steps through Accelerate; see `run_lightning`."""
    import accelerate
    from accelerate.state import AcceleratorState
    from accelerate.utils import AORecipeKwargs

    AcceleratorState._reset_state(reset_partial_state=True)  # of the variant before
    recorder = _Recorder(device, len(tokens) // batch)
    by_accelerate = variant.peer == "torchao by Accelerate"
    handlers: list[Any] = []
    if by_accelerate:
        handlers = [AORecipeKwargs(config=peers.runnable(AORecipeKwargs().config))]
    if variant.config:
        handlers = [FP8Kwargs(FP8Config(**variant.config))]
    fp8 = by_accelerate or variant.precision == "fp8-mixed"
    accelerator = accelerate.Accelerator(
        mixed_precision="fp8" if fp8 else "bf16",
        cpu=device.type == "cpu",
        kwargs_handlers=handlers,
    )
    model = causal_lm(layout, variant, device)
    optimizer = optimizer_of(variant, model.parameters(), device)
    loader = DataLoader(TensorDataset(tokens), batch_size=batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if compiled:
        compile_layers(model)
    for (some,) in loader:
        recorder.begin()
        loss = model(input_ids=some, labels=some, use_cache=False).loss
        recorder.marks.end("forward")
        accelerator.backward(loss)
        recorder.marks.end("backward")
        optimizer.step()
        optimizer.zero_grad()
        recorder.finish(loss, model)
    recorder.close()
    accelerator.free_memory()
    return recorder.result()


HOSTS = {"lightning": run_lightning, "accelerate": run_accelerate}
