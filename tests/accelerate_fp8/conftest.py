"""Runs scripts as a user would, with a meter of GEMMs in their processes; a tiny model."""

import importlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes import ran

SCRIPTS = Path(__file__).parent / "scripts"
PROBE = Path(__file__).parents[1] / "probe"
IMPORTS_THEM = ("explicit_import.py", "loop.py")  # hosts, in an order that is tested


@dataclass
class Run:
    """What a run of a script left behind.

    Attributes:
        fp8: calls of torch's scaled matmul, over all processes of the script.
        linear: calls of torch's ordinary linear, likewise.
        processes: of the script, without the launcher's.
    """

    returncode: int
    stdout: str
    stderr: str
    fp8: int
    linear: int
    processes: int


@pytest.fixture
def environment(tmp_path):
    """A user's environment: nothing chosen for Accelerate, no configuration file, no network."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ACCELERATE_", "TORCH_FP8_", "TORCH_DEVICE_BACKEND"))
    }
    search = [str(PROBE), *filter(None, [kept.get("PYTHONPATH")])]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(search),
        "HF_HOME": str(tmp_path / "hf_home"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
    }


@pytest.fixture
def run(tmp_path, environment, forked_python, forked_hosts):
    """``run("loop.py", *arguments, launch=("--mixed_precision", "fp8"), **environment)``.

    `launch` None: ``python script``; else ``accelerate launch`` with these flags, on the CPU.
    `fails`: whether it is to fail. `before`: a folder to search for modules first. `processes`: on
    the CPU Accelerate's launcher starts one, or torch's, which starts more. With `before` a Python
    that has imported nothing before.
    """

    def run_script(
        script, *arguments, launch=None, fails=False, processes=1, before=None, **variables
    ):
        counts = tmp_path / f"counts{len(list(tmp_path.glob('counts*')))}"
        counts.mkdir()
        is_stock = "TORCH_DEVICE_BACKEND_AUTOLOAD" in variables
        forked = forked_python if is_stock or script in IMPORTS_THEM else forked_hosts
        command = [forked if before is None else sys.executable]
        if launch is not None:
            command += ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
            command += launch
        if processes > 1:
            command += ["--module", "torch.distributed.run", "--standalone"]
            command += ["--nproc_per_node", str(processes)]
        command += [str(SCRIPTS / script), *map(str, arguments)]
        variables = {**environment, "FP8_PROBE_OUT": str(counts), **variables}
        if before is not None:
            variables["PYTHONPATH"] = os.pathsep.join([str(before), variables["PYTHONPATH"]])
        done = ran(*command, env=variables, cwd=tmp_path, fails=fails)
        of_script = [
            entry
            for entry in (json.loads(path.read_text()) for path in counts.iterdir())
            if entry["argv"][0].endswith(script)
        ]
        return Run(
            done.returncode,
            done.stdout,
            done.stderr,
            sum(entry["scaled_mm"] for entry in of_script),
            sum(entry["linear"] for entry in of_script),
            len(of_script),
        )

    return run_script


@pytest.fixture
def hidden_torchao(tmp_path):
    """A folder that shadows torchao: the module fails to import, its metadata is too old."""
    folder = tmp_path / "hidden"
    metadata = folder / "torchao-0.0.1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torchao\nVersion: 0.0.1\n")
    (folder / "torchao.py").write_text("raise ImportError('hidden')\n")
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A folder with a Llama of two layers, hidden size 64, and a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, set_seed

    from tests.models import llama

    folder = tmp_path_factory.mktemp("tiny_model")
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = ["<unk>", "<pad>", "<s>", "</s>"]
    text = "the cat sat on a mat and one dog ran in this park for ever user assistant :"
    words.train_from_iterator([text], trainers.WordLevelTrainer(special_tokens=special))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template="{% for m in messages %}{{ m['role'] + ' : ' + m['content'] + ' ' }}"
        "{% endfor %}",
        model_input_names=["input_ids", "attention_mask"],  # as Llama's
    )
    tokenizer.save_pretrained(folder)
    set_seed(0)
    special = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
    model = llama(num_attention_heads=2, max_position_embeddings=128, **special)
    model.save_pretrained(folder)
    return folder


def experts_in(folder, tiny_model, name):
    """Save a tiny mixture of experts with the tiny model's tokenizer; return the folder."""
    from transformers import PreTrainedTokenizerFast, set_seed

    from tests.moe_models import moe_model

    PreTrainedTokenizerFast.from_pretrained(tiny_model).save_pretrained(folder)
    set_seed(0)
    moe_model(name, eos_token_id=3, bos_token_id=2, pad_token_id=1).save_pretrained(folder)
    return folder


@pytest.fixture
def accelerate(monkeypatch):
    """The module, with nothing chosen in the environment and its shared state reset afterwards."""
    import accelerate
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "TORCH_FP8_")):
            monkeypatch.delenv(name)

    def reset():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState._reset_state()

    reset()
    yield accelerate
    reset()


@pytest.fixture
def accelerator_with(accelerate):
    """``accelerator_with(config=None, **options)``: one of FP8 on the CPU."""

    def make(config=None, **options):
        if config is not None:
            options["kwargs_handlers"] = [
                importlib.import_module("accelerate_fp8").FP8Kwargs(config)
            ]
        return accelerate.Accelerator(mixed_precision="fp8", cpu=True, **options)

    return make


@pytest.fixture
def fp8(accelerator_with):
    return accelerator_with()


@pytest.fixture
def messages(caplog):
    """``messages()``: what was logged."""
    caplog.set_level("INFO", logger="accelerate_fp8")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "accelerate_fp8"]
