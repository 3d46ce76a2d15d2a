"""Options that 0.1.0 had and this version removed: every entry refuses them by name."""

import json

import pytest

import torch_fp8
from accelerate_fp8 import FP8Kwargs
from lightning_fp8 import FP8Precision
from tests.internals import REMOVED, main
from torch_fp8 import FP8Config


def _from_environment(monkeypatch, options):
    monkeypatch.setenv("TORCH_FP8_CONFIG", json.dumps(options))
    torch_fp8.convert_to_float8(None)


ENTRIES = {
    "FP8Config": lambda _, options: FP8Config(**options),
    "JSON": lambda _, options: FP8Config.from_json(json.dumps(options)),
    "environment": _from_environment,
    "FP8Precision": lambda _, options: FP8Precision(**options),
    "FP8Kwargs": lambda _, options: FP8Kwargs(**options),
    "plan": lambda _, options: torch_fp8.plan("model", **options),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", ["gone", *REMOVED])
def test_a_removed_option_is_refused_with_what_to_take_instead(monkeypatch, name, entry):
    monkeypatch.setitem(REMOVED, "gone", "take recipe='rowwise'")
    with pytest.raises((TypeError, ValueError), match="no longer takes") as raised:
        ENTRIES[entry](monkeypatch, {name: 1})
    assert f"{name!r}: {REMOVED[name]}" in str(raised.value)


FLAGS = {
    "plan llama-3.1-8b --save-attention qkv": "no longer takes --save-attention: "
    + REMOVED["save_attention"],
    "plan llama --largest": "no longer takes --largest: plan the presets",
    "report run --compare other": "no longer takes --compare: use torch-fp8 compare",
    "env --self-test --report x": "no longer takes --report: write the output to a file",
    "check model": "no command 'check' any more: run a few steps with",
}


@pytest.mark.parametrize("command", FLAGS)
def test_a_removed_flag_of_the_command_is_refused(command, capsys):
    with pytest.raises(SystemExit):
        main(command.split())
    assert FLAGS[command] in capsys.readouterr().err
