"""The kernels of softmax losses compile for Hopper and Blackwell, without a card."""

import pytest
import torch

from tests.internals import kernels_cross_entropy as cross_entropy
from tests.torch_fp8.kernels.conftest import (  # noqa: F401  (fixtures)
    compile_all,
    compile_for,
    record_launches,
    recorded_resources,
)
from tests.torch_fp8.loss_head.loss_cases import BF16, launch_losses

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": BF16}
WIDTHS = {"odd": 1003, "whole": 8192}


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "width"), [("fp32", "whole"), ("fp16", "whole"), ("bf16", "whole"), ("bf16", "odd")]
)
def test_losses_compile_without_spills(dtype, width, record_launches, compile_all):  # noqa: F811
    with record_launches(cross_entropy) as launches:
        launch_losses(cross_entropy, DTYPES[dtype], WIDTHS[width])
    # Columns of an odd number are moved one by one.
    for ptx in compile_all(launches, registers=128 if width == "whole" else 255):
        # triton-lang/triton#11111: next to these, transposed one-byte stores are corrupted.
        if "cross_entropy_cast_kernel" in ptx:
            assert "min.NaN" not in ptx
            assert "max.NaN" not in ptx
            # Of 16 elements per thread, in pairs, for both layouts together.
            assert ptx.count("cvt.rn.satfinite.e5m2x2.f32") == 8


def test_numbers_of_tokens_are_no_constants(record_launches):  # noqa: F811
    with record_launches(cross_entropy) as launches:
        launch_losses(cross_entropy, BF16)
    for launch in launches:
        assert "rows" not in {name for name, _ in launch.constants}
