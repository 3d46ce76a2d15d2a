"""Graphs, breaks and recompilations of a compiled step in FP8 and in BF16.

    python -m benchmarks.evidence.graph_counts    # runs/benchmarks/graph_counts.csv

Each program trains a tiny model for two steps under torch.compile with the backend ``aot_eager``:
Dynamo and AOTAutograd trace it, and no code is generated. It runs in its own process, forked
from this one, at each level and in BF16, which is autocast in a plain loop and the host's
``bf16`` otherwise. Programs that run on two ranks count on the first.

* ``graphs``: graphs that the backend compiled; ``breaks``: graph breaks; ``recompilations``: frames
  that were compiled again because a guard failed; ``dropped``: frames that Dynamo gave up, which
  run eagerly and have no break. The columns ``bf16_`` are those of BF16;
* ``failure``: the error of a program that failed, in FP8 or in BF16.

Programs whose rows are in the file are not counted again, unless they failed.
"""

import argparse
import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.architectures import batch_for, make
from benchmarks.measurement import environment, print_table
from benchmarks.rows import add_csv, read_rows, tell_kept, write_rows
from tests.compiled_graphs import Graphs, count_graphs
from tests.models import llama
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8
from torch_fp8.distributed.ddp.wrap import connect_ddp, ddp_options
from torch_fp8.distributed.fsdp.connect import connect_fsdp

LEVELS = ("O1", "O2", "O3")
BF16 = "BF16"
KEY = ("program", "host", "level")
COLUMNS = (
    *(*KEY, "torch", *Graphs._fields, *(f"bf16_{name}" for name in Graphs._fields), "failure"),
    *("commit", "date", "command"),
)
TIMEOUT_S = 600
STEPS = 2
TEXT = ["the cat sat on a mat", "one dog ran in this park"] * 2


class Program(NamedTuple):
    """A program that compiles.

    Attributes:
        host: the library whose loop runs, or "own".
        run: trains at a level.
        ranks: number of processes.
        levels: those that the program has.
    """

    host: str
    run: Callable[[str], None]
    ranks: int = 1
    levels: tuple[str, ...] = LEVELS


def _compiled(model: Any) -> Any:
    return torch.compile(model, backend="aot_eager")  # Lightning replaces the function


def config_of(level: str, **options: Any) -> FP8Config:
    return FP8Config(recipe="tensorwise", opt_level=level, **options)


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def tokens(length: int = 16) -> dict[str, torch.Tensor]:
    ids = torch.randint(4, 20, (2, length))
    return {"input_ids": ids, "labels": ids}


def converted(model: nn.Module, level: str, **options: Any) -> torch.optim.Optimizer:
    """Convert a model in place, and return its AdamW."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    if level != BF16:
        config = config_of(level, **options)
        convert_to_float8(model, config)
        convert_optimizer(optimizer, config, model=model)
    return optimizer


def train(
    model: Any, optimizer: Any, batches: list[dict[str, torch.Tensor]], micro_batches: int = 1
) -> None:
    for step, batch in enumerate(batches):
        with autocast():
            loss = model(**batch).loss
        loss.backward()
        if (step + 1) % micro_batches == 0:
            optimizer.step()
            optimizer.zero_grad()


def own_loop(level: str, name: str = "llama") -> None:
    """A model of transformers, converted, then compiled."""
    model = make(name)
    batch = batch_for(name, model, torch.Generator().manual_seed(1))
    optimizer = converted(model, level)
    train(_compiled(model), optimizer, [batch] * STEPS)


def llama_loop(
    level: str,
    *,
    first: bool = False,
    checkpointing: bool = False,
    micro_batches: int = 1,
    lengths: tuple[int, ...] = (16,) * STEPS,
    **options: Any,
) -> None:
    """A Llama in a plain loop; `first`: compiled before it is converted."""
    model = llama()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    called = _compiled(model) if first else None
    optimizer = converted(model, level, **(options if level == "O3" else {}))
    batches = [tokens(length) for length in lengths for _ in range(micro_batches)]
    called = _compiled(model) if called is None else called
    train(called, optimizer, batches, micro_batches)


def lora_loop(level: str) -> None:
    """Adapters on a frozen base, which is stored in FP8 only."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(llama(), lora)
    optimizer = converted(model, level)
    train(_compiled(model), optimizer, [tokens()] * STEPS)


def ddp_loop(level: str, *, whole: bool) -> None:
    from torch.nn.parallel import DistributedDataParallel

    model = llama()
    optimizer = converted(model, level)
    options = {} if level == BF16 else ddp_options(model, [optimizer])
    ddp = DistributedDataParallel(model, **options)
    if level != BF16:
        connect_ddp(ddp, [optimizer], config_of(level))
    with torch._dynamo.config.patch(optimize_ddp=not whole):
        train(_compiled(ddp), optimizer, [tokens()] * STEPS)


def fsdp_loop(level: str, *, layers: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, config = llama(), config_of("O2" if level == BF16 else level)
    if level != BF16:
        convert_to_float8(model, config)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        if layers:
            layer.compile(backend="aot_eager")
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if level != BF16:
        connect_fsdp(model, config)
        convert_optimizer(optimizer, config, model=model)
    train(model if layers else _compiled(model), optimizer, [tokens()] * STEPS)


def lightning_trainer(level: str, *, place: str) -> None:
    """Lightning's Trainer; `place`: where the module compiles."""
    import lightning
    from torch.utils.data import DataLoader

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model: Any = None if place == "configure_model" else llama()
            if place == "__init__":
                self.model = _compiled(self.model)
            if place == "module.compile()":
                self.model.compile(backend="aot_eager")
            if place == "layers":
                for layer in self.model.model.layers:
                    layer.compile(backend="aot_eager")

        def configure_model(self) -> None:
            if self.model is None:
                self.model = _compiled(llama())

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options: dict[str, Any] = dict.fromkeys(quiet, False)
    options |= {"accelerator": "cpu", "devices": 1, "max_steps": STEPS}
    batches = torch.stack([tokens()["input_ids"][0] for _ in range(4)])
    lightning.Trainer(**options, **_precision(level)).fit(
        Module(), DataLoader(batches, batch_size=2)
    )


def _precision(level: str) -> dict[str, Any]:
    from lightning_fp8 import FP8Precision

    if level == BF16:
        return {"precision": "bf16-mixed"}
    return {"plugins": FP8Precision(config_of(level))}


def fabric_loop(level: str, *, first: bool) -> None:
    """Fabric; `first`: compiled before ``setup``."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, **_precision(level))
    model: Any = llama()
    optimizer: Any = torch.optim.AdamW(model.parameters())
    model, optimizer = fabric.setup(_compiled(model) if first else model, optimizer)
    model = model if first else _compiled(model)
    for _ in range(STEPS):
        fabric.backward(model(**tokens()).loss)
        optimizer.step()
        optimizer.zero_grad()


def _host_environment(level: str) -> str:
    """Choose a level for Accelerate, and return the name of its precision."""
    precision = "bf16" if level == BF16 else "fp8"
    os.environ["ACCELERATE_MIXED_PRECISION"] = precision
    if level != BF16:
        options = {"recipe": "tensorwise", "opt_level": level}
        os.environ["TORCH_FP8_CONFIG"] = json.dumps(options)
    return precision


def accelerate_loop(level: str, *, regional: bool) -> None:
    from accelerate import Accelerator
    from accelerate.utils import TorchDynamoPlugin

    precision = _host_environment(level)
    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, dynamo_plugin=plugin)
    model: Any = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(STEPS):
        accelerator.backward(model(**tokens()).loss)
        optimizer.step()
        optimizer.zero_grad()


def trainer(level: str, *, name: str, **options: Any) -> None:
    """A Trainer of transformers or TRL with ``torch_compile=True``."""
    precision = _host_environment(level)
    with tempfile.TemporaryDirectory() as folder:
        _save_tiny_model(Path(folder))
        arguments = {
            **{"output_dir": f"{folder}/output", "max_steps": STEPS, "torch_compile": True},
            **{"per_device_train_batch_size": 2, "torch_compile_backend": "aot_eager"},
            **{"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True},
            **{"bf16": precision == "bf16", "gradient_checkpointing": False},
        }
        _TRAINERS[name](folder, arguments | options).train()


def _save_tiny_model(folder: Path) -> None:
    """Save a Llama, and a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<pad>", "<s>", "</s>"]
    words = [*special, *dict.fromkeys(" ".join(TEXT).split()), "user", "assistant", ":"]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("unk_token", "pad_token", "bos_token", "eos_token"), special, strict=True))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **names,
        model_input_names=["input_ids", "attention_mask"],
        chat_template="{% for m in messages %}{{ m['role'] + ' : ' + m['content'] + ' ' }}"
        "{% endfor %}",
    ).save_pretrained(folder)
    ids = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
    llama(max_position_embeddings=128, **ids).save_pretrained(folder)


def _transformers_trainer(folder: str, arguments: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    rows = [{name: x[0] for name, x in tokens().items()} for _ in range(4)]
    model = AutoModelForCausalLM.from_pretrained(folder)
    return Trainer(model, TrainingArguments(**arguments), train_dataset=rows)


def _trl(kind: str, peft: bool, folder: str, arguments: dict[str, Any]) -> Any:
    import trl
    from datasets import Dataset
    from peft import LoraConfig

    lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM") if peft else None
    rows = {"prompt": TEXT, "chosen": TEXT[::-1], "rejected": TEXT}
    rows = {"SFT": {"text": TEXT}, "GRPO": {"prompt": TEXT}}.get(kind, rows)
    data: dict[str, Any] = {"train_dataset": Dataset.from_dict(rows), "peft_config": lora}
    if kind == "GRPO":
        arguments |= {"num_generations": 2, "max_completion_length": 8, "beta": 0.1}
        data["reward_funcs"] = lambda completions, **_: [float(len(c)) for c in completions]
    config = getattr(trl, f"{kind}Config")(**arguments)
    return getattr(trl, f"{kind}Trainer")(folder, args=config, **data)


_TRAINERS: dict[str, Callable[[str, dict[str, Any]], Any]] = {
    "Trainer": _transformers_trainer,
    **{kind: functools.partial(_trl, kind, False) for kind in ("SFT", "DPO", "GRPO", "Reward")},
    "SFT, LoRA": functools.partial(_trl, "SFT", True),
    "DPO, LoRA": functools.partial(_trl, "DPO", True),
}
_MODELS = {
    **{"Llama": "llama", "Qwen3": "qwen3", "Gemma-3": "gemma3_text", "GPT-2": "gpt2"},
    **{"Qwen3-MoE": "qwen3_moe", "GPT-OSS": "gpt_oss", "ViT": "vit", "T5": "t5"},
    "Whisper": "whisper",
}
partial = functools.partial
PROGRAMS: dict[str, Program] = {
    **{name: Program("own", partial(own_loop, name=key)) for name, key in _MODELS.items()},
    "compiled before conversion": Program("own", partial(llama_loop, first=True)),
    "checkpointing": Program("own", partial(llama_loop, checkpointing=True)),
    "two micro-batches": Program("own", partial(llama_loop, micro_batches=2)),
    "gradient release": Program("own", partial(llama_loop, gradient_release=True), levels=("O3",)),
    "lengths 16, 24, 32, 40": Program("own", partial(llama_loop, lengths=(16, 24, 32, 40))),
    "LoRA": Program("own", lora_loop),
    "DDP": Program("own", partial(ddp_loop, whole=False), ranks=2),
    "DDP, one graph": Program("own", partial(ddp_loop, whole=True), ranks=2),
    "FSDP2, layers": Program("own", partial(fsdp_loop, layers=True), ranks=2),
    "FSDP2": Program("own", partial(fsdp_loop, layers=False), ranks=2),
    **{
        place: Program("Lightning", partial(lightning_trainer, place=place))
        for place in ("layers", "__init__", "configure_model", "module.compile()")
    },
    "before setup": Program("Fabric", partial(fabric_loop, first=True)),
    "after setup": Program("Fabric", partial(fabric_loop, first=False)),
    "whole": Program("Accelerate", partial(accelerate_loop, regional=False)),
    "regional": Program("Accelerate", partial(accelerate_loop, regional=True)),
    "Trainer": Program("transformers", partial(trainer, name="Trainer")),
    "Trainer, checkpointing": Program(
        "transformers", partial(trainer, name="Trainer", gradient_checkpointing=True)
    ),
    **{
        name: Program("TRL", partial(trainer, name=name))
        for name in ("SFT", "SFT, LoRA", "DPO", "DPO, LoRA", "GRPO", "Reward")
    },
}


def counted(name: str, level: str) -> tuple[Graphs | None, str]:
    """Count a program's graphs in its own processes; return None and the error if it fails."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    ranks = PROGRAMS[name].ranks
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store" if ranks > 1 else ""
        processes = [
            context.Process(target=_count, args=(name, level, rank, store, results))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        processes[0].join(TIMEOUT_S)
        for process in processes:
            process.join(0 if processes[0].exitcode else 30)
            if process.is_alive():
                process.kill()
    if results.empty():
        return None, f"exit code {processes[0].exitcode}"
    result = results.get()
    return (None, result) if isinstance(result, str) else (Graphs(*result), "")


def _count(name: str, level: str, rank: int, store: str, results: Any) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    program = PROGRAMS[name]
    if store:
        ranks = {"rank": rank, "world_size": program.ranks}
        dist.init_process_group("gloo", init_method=store, **ranks)
    result: Any
    try:
        with contextlib.redirect_stdout(sys.stderr):
            result = tuple(count_graphs(lambda: program.run(level)))
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        result = f"{type(error).__name__}: {line}"[:200]
    if rank == 0:
        results.put(result)
    os._exit(0)  # without what hosts and process groups do at exit


def rows_of(name: str, levels: Sequence[str] = LEVELS) -> list[dict[str, Any]]:
    """Return a row of a program for each level."""
    expected, failed = counted(name, BF16)
    rows = []
    for level in levels:
        graphs, failure = counted(name, level)
        row = dict(zip(KEY, (name, PROGRAMS[name].host, level), strict=True))
        row |= {f"bf16_{key}": n for key, n in (expected._asdict() if expected else {}).items()}
        row |= graphs._asdict() if graphs else {}
        if not failed and expected is not None and not expected.graphs:
            failed = "no graph"
        rows.append(row | {"failure": failure or (f"BF16: {failed}" if failed else "")})
    return rows


def warm_up() -> None:
    """Import the programs' modules once for all of them."""
    for module in ("lightning.fabric", "peft", "trl", "accelerate_fp8", "lightning_fp8"):
        importlib.import_module(module)
    torch.set_num_threads(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=LEVELS)
    add_csv(parser, "graph_counts")
    options = parser.parse_args()
    warm_up()
    about = environment(torch.device("cpu"))
    tell_kept(options.csv)
    rows = {tuple(row[name] for name in KEY): row for row in read_rows(options.csv)}
    for name in options.programs:
        program = PROGRAMS[name]
        levels = [level for level in options.levels if level in program.levels]
        recorded = (rows.get((name, program.host, level)) for level in levels)
        if all(row is not None and not row["failure"] for row in recorded):
            continue
        for row in rows_of(name, levels):
            rows[name, program.host, row["level"]] = about | row
        write_rows(options.csv, COLUMNS, rows.values())
    shown = [row for row in rows.values() if row["failure"] or excess(row)]
    print(f"{len(shown)} of {len(rows)} rows have more than BF16, or failed")
    print_table((*KEY, *COLUMNS[4:13]), shown)


def excess(row: dict[str, Any]) -> int:
    """Return how many more graphs, recompilations and interruptions a row has than BF16.

    An interruption is a break or a dropped frame: Dynamo has one or the other at a place.
    """
    names = ("graphs",), ("recompilations",), ("breaks", "dropped")
    counts = (
        sum(int(row[name]) - int(row[f"bf16_{name}"]) for name in together) for together in names
    )
    return sum(max(count, 0) for count in counts)


if __name__ == "__main__":
    main()
