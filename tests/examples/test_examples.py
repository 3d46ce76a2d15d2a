import ast
import os
import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.processes import ran

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = ("dpo", "grpo", "lora", "loop", "ppo", "sft", "sft_lightning")
RESULTS = {
    "dpo": r"held-out loss (?P<after>[\d.]+) \(0.693 at the start\), \d+% of the pairs ranked",
    "grpo": r"mean reward [\d.]+ -> [\d.]+",
    "ppo": r"score -?[\d.]+ -> -?[\d.]+",
}
FROZEN = {"lora": (1, 1), "dpo": (1, 1), "ppo": (2, 2)}
"""The models of a script that are trained, and those that are frozen or have a frozen base."""
LOSSES = r"held-out loss (?P<before>[\d.]+) -> (?P<after>[\d.]+)"


def test_these_are_all_scripts():
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_stands_alone(name):
    source = (EXAMPLES / f"{name}.py").read_text()
    assert 40 <= len(source.splitlines()) <= 120
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).partition(".")[0])
    assert not imported & {path.stem for path in EXAMPLES.glob("*.py")}
    assert not re.search(r"torch_fp8|lightning_fp8|accelerate_fp8|Float8", source)
    for option in ("--model", "--data", "--quick", "--output"):
        assert f'add_argument("{option}"' in source


@pytest.mark.long
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains_in_fp8_and_saves_what_stock_reads(name, forked_hosts, tmp_path):
    """One script starts behind the launcher; others get what that sets."""
    launched = name == "sft"
    command = [forked_hosts]
    if launched:
        command += ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
        command += ["--mixed_precision", "fp8"]
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "TORCH_FP8_"))},
        "HF_HUB_OFFLINE": "1",
    }
    if not launched:
        environment |= {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_USE_CPU": "true"}
    command += [EXAMPLES / f"{name}.py", "--quick", "--output", tmp_path / "out"]
    done = ran(*command, env=environment, cwd=tmp_path)
    printed = done.stdout + done.stderr
    reports = re.findall(r"FP8: 14 of 15 linear layers", printed)
    frozen = re.findall(r"14 frozen weights stored in FP8 only, 1\.000 bytes", printed)
    assert (len(reports), len(frozen)) == FROZEN.get(name, (1, 0)), printed
    result = re.search(RESULTS.get(name, LOSSES), printed)
    assert result is not None, printed[-2000:]
    found = result.groupdict()
    if "after" in found:
        assert float(found["after"]) < float(found.get("before", 0.69)) - 0.1
    if name != "lora":  # which saves adapters
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert type(model).__name__ == "LlamaForCausalLM"
        assert all(parameter.isfinite().all() for parameter in model.parameters())
    else:
        assert (tmp_path / "out" / "adapter_model.safetensors").exists()
