import json
from pathlib import Path

import finetune
import pytest
from script_start import Refusal


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a\n\n", "completion": "b"},
        {"instruction": "a", "input": "", "output": "b"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    ],
)
def test_the_example_gets_prompts_and_completions(row, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    given = ["--model", "m", "--data", str(tmp_path / "rows.jsonl"), "--assets", str(tmp_path)]
    words = finetune.command(finetune.argument_parser().parse_args([*given, "--steps", "9"]))
    pairs = Path(words[words.index("--data") + 1])
    assert json.loads(pairs.read_text()) == {"prompt": "a\n\n", "completion": "b"}
    program = words[words.index("--") :]
    assert "--fast-cpu" in words[: words.index("--")]
    assert program[2].endswith("examples/sft_lightning.py")
    assert words[words.index("--steps") + 1] == "10"
    assert program[program.index("--steps") + 1] == "9"


def test_a_mistake_in_the_data_is_refused_before_a_model_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "x", "completion": "y"}\n{"prompt": \n')
    arguments = finetune.argument_parser().parse_args(["--data", "rows.jsonl"])
    with pytest.raises(Refusal, match=r"rows\.jsonl, line 2: not JSON"):
        finetune.command(arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
