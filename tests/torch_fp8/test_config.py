import copy
import dataclasses
import inspect
import itertools
import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.internals import FORMATS, GEMMS, RECIPES, config_or_default
from torch_fp8 import FP8Config, conversion_report, convert_optimizer, convert_to_float8

TE, ROWWISE = {"backend": "transformer-engine"}, {"monitor": 10, "on_alarm": "rowwise"}


def test_json_round_trip():
    config = FP8Config(
        recipe="delayed", amax_history_len=16, skip=("a", "b.*"), wgrad="bf16", communication="off"
    )
    assert FP8Config.from_json(config.to_json()) == config


def test_reads_a_file(tmp_path):
    path = tmp_path / "fp8.json"
    path.write_text('{"recipe": "rowwise"}')
    assert FP8Config.from_json(path) == FP8Config(recipe="rowwise")


def test_reads_the_environment(monkeypatch, tmp_path):
    assert FP8Config.from_env() is None
    monkeypatch.setenv("TORCH_FP8_CONFIG", "rowwise")
    assert FP8Config.from_env() == FP8Config(recipe="rowwise")
    monkeypatch.setenv("TORCH_FP8_CONFIG", json.dumps({"recipe": "mxfp8", "skip": ["head"]}))
    assert FP8Config.from_env() == FP8Config(recipe="mxfp8", skip=("head",))
    path = tmp_path / "fp8.json"
    path.write_text('{"wgrad": "bf16", "communication": "off"}')
    monkeypatch.setenv("TORCH_FP8_CONFIG", str(path))
    assert FP8Config.from_env() == FP8Config(wgrad="bf16", communication="off")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"recipe": "tensorwize"}, "tensorwise"),
        ({"wgrad": "fp32"}, "bf16"),
        ({"grad_format": "e3m4"}, "e5m2"),
        ({"amax_compute_algo": "mean", "recipe": "delayed"}, "most_recent"),
        ({"fast_accum": ("forward",)}, "fprop"),
        ({"opt_level": "O4"}, "O1"),
        ({"communication": "bf16"}, "'auto', 'fp8', 'off'"),
        ({"opt_level": "O1", "gradient_release": True}, "excludes gradient_release"),
        ({"amax_history_len": 0, "recipe": "delayed"}, "at least 1"),
        ({"margin": 9, "recipe": "delayed"}, "from 0 to 8"),
        ({"margin": -1, "recipe": "delayed"}, "at least 0"),
    ],
    ids=lambda v: str(v),
)
def test_unknown_values_name_the_valid_ones(options, named):
    with pytest.raises(ValueError, match=named) as raised:
        FP8Config(**options)
    assert next(iter(options)) in str(raised.value)


def test_an_unknown_option_names_the_valid_ones():
    message = r"'recipee'.*valid ones are recipe, wgrad.*did you mean 'recipe'\?"
    with pytest.raises(TypeError, match=message):
        FP8Config(recipee="auto")
    with pytest.raises(ValueError, match=message):
        FP8Config.from_json('{"recipee": "auto"}')


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("Row-wise", "did you mean 'rowwise'?"),
        ("rowwise_with_gw_hp", "recipe='rowwise', wgrad='bf16'"),
        ("MXFP8BlockScaling", "recipe='mxfp8'"),
    ],
)
def test_an_unknown_recipe_is_answered_with_the_nearest_everywhere(value, meant, monkeypatch):
    with pytest.raises(ValueError, match=re.escape(meant)):
        FP8Config(recipe=value)
    with pytest.raises(ValueError, match=re.escape(meant)):
        FP8Config(overrides={"0": {"recipe": value}})
    with pytest.raises(TypeError, match=re.escape(meant)):
        config_or_default(value)
    monkeypatch.setenv("TORCH_FP8_CONFIG", value)
    with pytest.raises(ValueError, match=re.escape(meant)):
        FP8Config.from_env()
    with pytest.raises(ValueError, match=r"did you mean 'wgrad'\?"):
        FP8Config(overrides={"0": {"wgrads": "bf16"}})


def test_copies_and_pickles():
    config = FP8Config(recipe="delayed", margin=1)
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config, margin=0) == FP8Config(recipe="delayed")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"amax_history_len": 16}, "amax_history_len"),
        ({"recipe": "rowwise", "margin": 1}, "margin"),
        ({"wgrad": "bf16", "fast_accum": ("wgrad",)}, "wgrad"),
        ({"recipe": "blockwise", "grad_format": "e5m2"}, "E4M3 only"),
        ({"recipe": "blockwise", "graph_scales": "last_step"}, "excludes graph_scales='last_step'"),
        ({**TE, "recipe": "rowwise"}, "excludes recipe='rowwise': it has tensorwise, delayed"),
        ({**TE, "recipe": "delayed", "amax_history_len": 1}, "amax_history_len=1"),
        ({**TE, "wgrad": "bf16", "emulate": True}, "excludes wgrad, emulate; use backend='torch'"),
        ({**TE, "fast_accum": ()}, "excludes fast_accum;"),
        ({**TE, "cache_weights": True}, "excludes cache_weights=True: it casts weights itself"),
        ({**TE, "monitor": 10}, "transformer-engine' excludes monitor"),
        ({"on_alarm": "bf16"}, "monitor=0 excludes on_alarm; use monitor=100"),
        ({**ROWWISE, "recipe": "rowwise"}, "that all layers already run"),
        ({**ROWWISE, "cache_weights": True}, "cache_weights"),
        ({"monitor": 10, "on_alarm": "quiet"}, "'warn', 'bf16'"),
        ({"monitor": -1}, "at least 0"),
        ({"monitor": 10, "fallback_steps": 0}, "at least 1"),
        ({"monitor": 10, "monitor_probes": ("everything",)}, "clip_search"),
    ],
    ids=str,
)
def test_contradictions_raise(options, named):
    with pytest.raises(ValueError, match=named):
        FP8Config(**options)


@pytest.mark.parametrize(
    "options",
    [{"skip": "lm_head"}, {"skip": (1,)}, {"eval_fp8": 1}, {"margin": 0.5, "recipe": "delayed"}],
    ids=lambda v: str(v),
)
def test_wrong_types_raise(options):
    with pytest.raises(TypeError, match=next(iter(options))):
        FP8Config(**options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"recipee": "auto"}', "'recipee'.*valid ones are recipe, wgrad"),
        ("{recipe}", "not valid JSON"),
        ("no/such/file.json", "neither a JSON object nor a readable file"),
        ('{"skip": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deep"),
    ],
    ids=["option", "JSON", "file", "nested"],
)
def test_bad_json_raises(monkeypatch, text, message):
    with pytest.raises(ValueError, match=message):
        FP8Config.from_json(text)
    monkeypatch.setenv("TORCH_FP8_CONFIG", text)
    with pytest.raises(ValueError, match=f"TORCH_FP8_CONFIG: .*{message}"):
        FP8Config.from_env()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1]", "JSON object"),
        (b"\xff\xfe\x00", r"fp8\.bin' is not UTF-8 text"),
        (b" " * (2**20 + 1), r"fp8\.bin' is larger than 1048576 bytes"),
    ],
    ids=["list", "bytes", "large"],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path, content, message):
    path = tmp_path / "fp8.bin"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        FP8Config.from_json(path)


CHOICES = {
    "recipe": ("auto", *RECIPES),
    "wgrad": ("fp8", "bf16"),
    "grad_format": FORMATS,
    "fast_accum": GEMMS,
    "amax_compute_algo": ("max", "most_recent"),
    "opt_level": ("O1", "O2", "O3"),
    "cache_weights": ("auto",),
    "communication": ("auto", "fp8", "off"),
    "save_activations": ("fp8", "bf16"),
    "backend": ("torch", "transformer-engine"),
}


def _documented(name):
    lines = inspect.getdoc(FP8Config).splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(f"    {name} ("))
    rest = itertools.takewhile(lambda line: line.startswith(" " * 8), lines[begin + 1 :])
    return " ".join(line.strip() for line in (lines[begin], *rest))


@pytest.mark.parametrize("field", dataclasses.fields(FP8Config), ids=lambda f: f.name)
def test_each_field_is_documented_where_help_sees_it(field):
    text = _documented(field.name)
    annotation = field.type if isinstance(field.type, str) else inspect.formatannotation(field.type)
    default = repr(getattr(FP8Config(), field.name)).replace("'", '"')
    assert text.startswith(f"{field.name} ({annotation}): ")
    assert text.endswith(f"Default: ``{default}``.")
    for choice in CHOICES.get(field.name, ()):
        assert f"``{choice}``" in text or f'``"{choice}"``' in text
        options = {field.name: (choice,) if field.name == "fast_accum" else choice}
        recipe = {"recipe": "delayed"} if field.name == "amax_compute_algo" else {}
        assert FP8Config(**recipe, **options)


def test_no_field_is_documented_that_there_is_not():
    documented = re.findall(r"^    (\w+) \(.*\): ", inspect.getdoc(FP8Config), re.MULTILINE)
    assert documented == [field.name for field in dataclasses.fields(FP8Config)]


@pytest.mark.parametrize("name", ["auto", *RECIPES])
def test_a_recipes_name_is_a_configuration(name):
    assert config_or_default(name) == FP8Config(recipe=name)


@pytest.mark.parametrize(
    ("config", "how"),
    [
        ("rowwize", r"name of a recipe \(auto, tensorwise"),
        ({"recipe": "rowwise"}, r"FP8Config\(\*\*options\)"),
        ('{"recipe": "rowwise"}', r"FP8Config.from_json\(text_or_path\)"),
        ("configs/fp8.json", r"FP8Config.from_json\(text_or_path\)"),
        (Path("fp8.json"), r"FP8Config.from_json\(text_or_path\)"),
        (True, r"of type bool; pass FP8Config\(\.\.\.\)"),
    ],
    ids=str,
)
def test_what_is_no_configuration_is_told_how_to_be_one(config, how):
    for convert, thing in (
        (convert_to_float8, nn.Linear(32, 32)),
        (conversion_report, nn.Linear(32, 32)),
        (convert_optimizer, torch.optim.AdamW([nn.Parameter(torch.zeros(2))])),
    ):
        with pytest.raises(TypeError, match=how):
            convert(thing, config)
    assert config_or_default(None) == FP8Config()


def test_a_second_layout_of_cached_weights_is_one_now():
    with pytest.raises(ValueError, match="'both' is True now"):
        FP8Config(cache_weights="both")
    config = FP8Config()
    config.__setstate__({**vars(config), "cache_weights": "both"})  # as 0.1.0 pickled it
    assert config.cache_weights is True
