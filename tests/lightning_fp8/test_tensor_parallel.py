import pytest


@pytest.mark.long
def test_a_mesh_of_data_and_tensor_parallelism(run):
    (result,) = run(["tensor_parallel.py"])
    assert result.returncode == 0, result.output
    assert "FP8: 4 of 4 linear layers" in result.output
    assert "FSDP2: 4 weights gathered in FP8" in result.output
    # Four layers, three GEMMs each, 15 steps, on each rank.
    assert result.fp8_gemms == [4 * 3 * 15] * 4
