from importlib.metadata import entry_points

import pytest

pytestmark = pytest.mark.long


# loop.py: 8 micro-batches through 3 layers; fprop and wgrad for each, dgrad for all but the first.
LOOP_GEMMS = 8 * (3 + 3 + 2)


@pytest.mark.smoke
def test_launcher_flag_runs_fp8_gemms(run):
    done = run("loop.py", launch=("--mixed_precision", "fp8"))
    assert (done.fp8, done.linear) == (LOOP_GEMMS, 0)
    assert "layer torch_fp8.nn.linear.Float8Linear" in done.stdout


def test_launcher_without_fp8_runs_none(run):
    done = run("loop.py", launch=("--mixed_precision", "no"))
    assert done.fp8 == 0
    assert done.linear > 0
    assert "layer torch.nn.modules.linear.Linear" in done.stdout


def test_constructor_argument_runs_fp8_gemms_and_shows_the_summary_once(run):
    done = run("loop.py", "fp8")
    assert done.fp8 == LOOP_GEMMS
    assert done.stderr.count("linear layers") == 1
    assert "3 of 3 linear layers, 100.0 % of the matmul FLOPs, level O2" in done.stderr
    assert "  optimizer AdamW with 8-bit states" in done.stderr
    assert "emulation on CPU" in done.stderr
    assert "bytes per parameter" in done.stderr


def test_environment_reaches_every_option_of_an_unmodified_script(run):
    options = '{"recipe": "tensorwise", "wgrad": "bf16", "skip": ["2"]}'
    done = run("loop.py", "fp8", TORCH_FP8_CONFIG=options)
    assert done.fp8 == 8 * (2 + 1)  # two layers; dgrad for the last only, no wgrad
    assert "tensorwise" in done.stderr
    assert "2: skip='2'" in done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(
    not entry_points(group="torch.backends", name="fp8_autoload"),
    reason="torch-fp8 is not installed here, so that nothing loads it for an unmodified script",
)
def test_constructor_argument_runs_fp8_gemms_on_the_card(run):
    # By name, for auto leaves layers as small as these in BF16.
    named = '{"recipe": "tensorwise"}'
    done = run("loop.py", "fp8", CUDA_VISIBLE_DEVICES="0", TORCH_FP8_CONFIG=named)
    assert done.fp8 == LOOP_GEMMS
    assert "torch scaled_mm on " in done.stderr
