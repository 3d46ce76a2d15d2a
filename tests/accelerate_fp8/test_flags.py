import argparse

import pytest
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import setup_fp8_env

from tests.internals import given_flags, resolve_config
from torch_fp8 import FP8Config


@pytest.fixture
def export(monkeypatch):
    """``export("--fp8_margin", "2", amax_history_length=16)``: what the launcher would export.

    Positional: its arguments. Named: entries of ``fp8_config`` in a configuration file.
    """

    def from_launcher(*arguments, **config_file):
        args = launch_command_parser().parse_args([*arguments, "script.py"])
        assert isinstance(args, argparse.Namespace)
        for key, value in config_file.items():  # as accelerate's _validate_launch_command does
            setattr(args, key if key.startswith("fp8") else f"fp8_{key}", value)
        for name, value in setup_fp8_env(args, {}).items():
            monkeypatch.setenv(name, value)

    monkeypatch.delenv("TORCH_FP8_CONFIG", raising=False)
    return from_launcher


def test_launchers_defaults_count_as_not_given(export):
    export()
    assert given_flags() == {}
    assert resolve_config(None) == (FP8Config(), [])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--fp8_format", "E4M3"), FP8Config(grad_format="e4m3")),
        (("--fp8_opt_level", "O1"), FP8Config(opt_level="O1")),
        (("--fp8_opt_level", "O2"), FP8Config(opt_level="O2")),
        (("--fp8_amax_history_len", "16"), FP8Config(recipe="delayed", amax_history_len=16)),
        (
            ("--fp8_amax_history_len", "16", "--fp8_amax_compute_algo", "max", "--fp8_margin", "1"),
            FP8Config(recipe="delayed", amax_history_len=16, margin=1),
        ),
        (("--fp8_amax_compute_algo", "max"), FP8Config(recipe="delayed")),
        (("--fp8_use_autocast_during_eval",), FP8Config(eval_fp8=True)),
        (("--fp8_override_linear_precision", "false,false,true"), FP8Config(wgrad="bf16")),
        (("--fp8_enable_fsdp_float8_all_gather", "false"), FP8Config()),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_flag_is_honoured(export, arguments, expected):
    export(*arguments)
    assert resolve_config(None) == (expected, [])


@pytest.mark.parametrize(
    ("config_file", "expected"),
    [
        (
            {"amax_history_length": 16, "amax_compute_algorithm": "max"},
            FP8Config(recipe="delayed", amax_history_len=16),
        ),
        ({"optimization_level": "O1"}, FP8Config(opt_level="O1")),
        ({"opt_level": "O3"}, FP8Config(opt_level="O3")),
        ({"use_mxfp8_block_scaling": True}, FP8Config(recipe="mxfp8")),
        ({"use_autocast_during_eval": True, "fp8_format": "HYBRID"}, FP8Config()),
        ({"override_linear_precision": [False, False, True]}, FP8Config(wgrad="bf16")),
        ({"recipe": "rowwise", "eval_fp8": False}, FP8Config(recipe="rowwise", eval_fp8=False)),
        ({"skip": ["lm_head", "model.layers.0"]}, FP8Config(skip=("lm_head", "model.layers.0"))),
        ({"seed": 4, "opt_level": "O3"}, FP8Config(seed=4, opt_level="O3")),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_config_files_spelling_is_honoured(export, config_file, expected):
    export(**config_file)
    assert resolve_config(None) == (expected, [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--fp8_format", "E5M2"), r"--fp8_format='E5M2'.*valid formats are HYBRID .* and E4M3"),
        (("--fp8_interval", "2"), r"--fp8_interval=2 .*is not supported.*every step"),
        (("--fp8_override_linear_precision", "true,false,false"), r"only fprop in high precision"),
        (("--fp8_override_linear_precision", "false,true,false"), r"only dgrad in high precision"),
        (("--fp8_pad_inner_dim", "false"), r"--fp8_pad_inner_dim=0 .*is not supported"),
        (("--fp8_amax_history_len", "0"), r"amax_history_len.*--fp8_amax_history_len=0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_honoured_is_refused_by_name(export, arguments, message):
    export(*arguments)
    with pytest.raises(ValueError, match=message):
        resolve_config(None)


@pytest.mark.parametrize(
    ("config_file", "message"),
    [
        ({"opt_level": "O4"}, r"opt_level='O4' is unknown.*'O1', 'O2', 'O3'.*--fp8_opt_level=O4"),
        ({"margin": "much"}, r"--fp8_margin='much'.*invalid literal"),
        ({"use_mxfp8_block_scaling": "maybe"}, r"expected true or false"),
        ({"amax_compute_algorithm": "mean"}, r"amax_compute_algo='mean'.*amax_compute_algorithm"),
        ({"recipe": "rowise"}, r"recipe='rowise' is unknown.*fp8_config.recipe=rowise"),
        (
            {"use_mxfp8_block_scaling": True, "recipe": "rowwise"},
            r"use_mxfp8_block_scaling=True and fp8_config.recipe=rowwise contradict",
        ),
        (
            {"use_mxfp8_block_scaling": True, "amax_history_len": 16},
            r"excludes amax_history_len; use recipe='delayed'.*use_mxfp8_block_scaling=True",
        ),
        (
            {"amax_history_len": 16, "amax_history_length": 32},
            r"--fp8_amax_history_len=16 and fp8_config.amax_history_length=32 contradict",
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_bad_or_contradictory_values_are_refused(export, config_file, message):
    export(**config_file)
    with pytest.raises(ValueError, match=message):
        resolve_config(None)


def test_environment_wins_over_flags_option_by_option(export, monkeypatch):
    export("--fp8_amax_history_len", "16", "--fp8_margin", "2")
    monkeypatch.setenv("TORCH_FP8_CONFIG", '{"recipe": "delayed", "amax_history_len": 1024}')
    config, notes = resolve_config(None)
    assert config == FP8Config(recipe="delayed", amax_history_len=1024, margin=2)
    assert notes == [
        "--fp8_amax_history_len=16 is not applied: TORCH_FP8_CONFIG says amax_history_len=1024"
    ]


def test_flag_for_another_recipe_than_the_environments_is_refused(export, monkeypatch):
    export("--fp8_amax_history_len", "16")
    monkeypatch.setenv("TORCH_FP8_CONFIG", '{"recipe": "rowwise"}')
    with pytest.raises(ValueError, match=r"'rowwise'.*--fp8_amax_history_len=16, TORCH_FP8_CONFIG"):
        resolve_config(None)


@pytest.mark.parametrize("explicit", [None, FP8Config()], ids=["flags", "FP8Kwargs"])
def test_a_key_that_is_no_field_is_named(export, explicit):
    export(backend="TORCH_FP8", recipee="rowwise", enable_fsdp_float8_all_gather=True)
    assert resolve_config(explicit) == (
        FP8Config(),
        ["fp8_config.recipee (ACCELERATE_FP8_RECIPEE) is not applied: FP8Config has no such field"],
    )


def test_explicit_config_wins_and_says_what_is_not_applied(export, monkeypatch):
    export("--fp8_margin", "2", "--fp8_opt_level", "O1")
    monkeypatch.setenv("TORCH_FP8_CONFIG", '{"recipe": "rowwise"}')
    explicit = FP8Config(recipe="blockwise")
    config, notes = resolve_config(explicit)
    assert config is explicit
    assert notes == [
        "--fp8_opt_level=O1 is not applied: the FP8Config in kwargs_handlers says opt_level='O2'",
        "--fp8_margin=2 is not applied: the FP8Config in kwargs_handlers says margin=0",
        "TORCH_FP8_CONFIG is not applied: the FP8Config in kwargs_handlers wins",
    ]
