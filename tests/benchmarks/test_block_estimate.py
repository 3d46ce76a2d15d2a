"""The estimate of a compiled block: at the measured point it is the measurement."""

import pytest

from benchmarks.evidence import block_estimate
from benchmarks.evidence.block_estimate import BF16, ELEMENTS, MEASURED, SEQUENCE, Rates, gpu_ms
from benchmarks.shapes import LLAMA_3_1_8B, parameter_shapes

RATES = Rates(products=10.0, attention=2.0, bandwidth=1e12)


def test_weights_are_those_of_a_block():
    matrices = [n * k for n, k in parameter_shapes(**LLAMA_3_1_8B | {"num_hidden_layers": 1})[1:8]]
    assert sum(ELEMENTS) == sum(matrices)


def test_parts_grow_with_tokens_as_they_do():
    def parts(tokens):
        product, attention, moved = (
            gpu_ms(tokens, Rates(*RATES._replace(**zero)), moved, constant, 2)
            for zero, moved, constant in (
                ({"attention": 0.0}, 0.0, 0.0),
                ({"products": 0.0}, 0.0, 0.0),
                ({"products": 0.0, "attention": 0.0}, 3e9, 1e9),
            )
        )
        return product, attention, moved

    weights = 6 * sum(ELEMENTS) / block_estimate.COPY * 1e3  # read for two products, written once
    assert parts(MEASURED) == pytest.approx((10.0, 2.0 + weights, 3.0 + weights))
    assert parts(2 * MEASURED) == pytest.approx((20.0, 4.0 + weights, 5.0 + weights))
    half = SEQUENCE // 2  # of one sequence: a quarter of the attention
    assert parts(half)[1:] == pytest.approx((2.0 / 8 + weights, 1.0 + 2.0 / 4 + weights))


def test_the_measured_point_is_the_measurement():
    rows = {(row["tokens"], row["variant"]): row for row in block_estimate.estimate()}
    measured = next(
        row
        for row in block_estimate.read_rows(block_estimate.RESULTS / "block_kernels.csv")
        if (row["variant"], row["mode"], row["kernel"]) == ("bf16", "compiled", "all")
    )
    bf16 = rows[MEASURED, BF16]
    assert float(bf16["gpu_ms"]) == pytest.approx(float(measured["ms"]), abs=0.01)
    assert bf16["speedup"] == bf16["replayed_speedup"] == "1.00"
    for row in rows.values():
        assert float(row["ms"]) == max(float(row["gpu_ms"]), float(row["host_ms"]))
