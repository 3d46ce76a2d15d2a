from types import SimpleNamespace

import pytest

import _fp8_points
from accelerate_fp8 import FP8Config, FP8Kwargs
from tests.internals import accelerate_register as _register

LINE = r"supports {0} [\d.]+ to [\d.]+, found {1}: pip install '{0}>=[\d.]+', or train without FP8"


@pytest.fixture
def installed(monkeypatch):
    """``installed(peft="0.1.0")``: what the metadata of the installed packages say."""

    def pretend(**found):
        real = _fp8_points.version
        monkeypatch.setattr(_fp8_points, "version", lambda name: found.get(name) or real(name))

    return pretend


@pytest.mark.parametrize("host", sorted({*_fp8_points.TRIED} - {"lightning"}))
def test_an_accelerator_names_a_host_that_is_too_old(host, accelerate, installed):
    __import__(host)
    installed(**{host: "0.0.9"})
    with pytest.raises(ImportError, match=LINE.format(host, "0.0.9")):
        accelerate.Accelerator(mixed_precision="fp8", cpu=True)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.Accelerator(mixed_precision="bf16", cpu=True)


@pytest.mark.parametrize("host", _fp8_points.TRIED)
def test_newer_hosts_are_let_through(host, installed):
    installed(**{host: "99.0"})
    assert _fp8_points.refusal(host) is None


def _stock(name):
    class Accelerator:
        def __init__(self, mixed_precision=None, kwargs_handlers=()):
            self.made = True

    class TrainingArguments:
        def __post_init__(self):
            self.made = True

    return SimpleNamespace(
        Accelerator=Accelerator, TrainingArguments=TrainingArguments, __name__=name
    )


def test_an_old_accelerate_says_so_when_it_is_asked_for_fp8(installed, monkeypatch):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    installed(accelerate="0.34.2")
    module = _stock("accelerate.accelerator")
    for _ in range(2):
        _register.extend(_stock("accelerate.state"))
        _register.extend(module)
    assert module.Accelerator("bf16").made
    with pytest.raises(ImportError, match=LINE.format("accelerate", "0.34.2")):
        module.Accelerator(mixed_precision="fp8")

    class TERecipeKwargs:
        """Another backend's, which this project does not stand in the way of."""

    assert module.Accelerator("fp8", kwargs_handlers=[TERecipeKwargs()]).made
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(ImportError, match=r"found 0\.34\.2"):
        module.Accelerator()
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
    assert module.Accelerator().made


def test_an_old_transformers_says_so_when_it_is_launched_with_fp8(installed, monkeypatch):
    installed(transformers="4.30.2")
    module = _stock("transformers.training_args")
    _register.extend(_stock("transformers.trainer"))
    _register.extend(module)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    arguments = module.TrainingArguments()
    arguments.__post_init__()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(ImportError, match=LINE.format("transformers", "4.30.2")):
        arguments.__post_init__()


# -- wrong calls ---------------------------------------------------------------------------------


def test_fields_of_the_configuration_are_accepted():
    assert FP8Kwargs(recipe="rowwise", wgrad="bf16").config == FP8Config(
        recipe="rowwise", wgrad="bf16"
    )
    assert FP8Kwargs().config is None
    assert FP8Kwargs(FP8Config()).to_kwargs() == {"config": FP8Config()}


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((FP8Config(),), {"recipe": "rowwise"}, ValueError, "got both: .* and recipe; put recipe"),
        (("rowwise",), {}, TypeError, r"did you mean FP8Kwargs\(recipe='rowwise'\)"),
        ((), {"recipes": "rowwise"}, TypeError, "recipes"),
        ((), {"recipe": "rowise"}, ValueError, "rowise"),
    ],
)
def test_other_arguments_are_named(arguments, options, error, message):
    with pytest.raises(error, match=message):
        FP8Kwargs(*arguments, **options)


@pytest.mark.parametrize("given", ["fp8-mixed", "FP8_mixed", "fp8-true"])
@pytest.mark.parametrize("where", ["argument", "environment"])
def test_lightnings_name_of_the_precision_is_recognized(accelerate, monkeypatch, given, where):
    argument = given if where == "argument" else None
    if where == "environment":
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", given)
    with pytest.raises(ValueError, match=f"'{given.lower()}' is unknown; did you mean 'fp8'"):
        accelerate.Accelerator(mixed_precision=argument, cpu=True)
