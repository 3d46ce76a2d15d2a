import math

import pytest
import torch

from tests.internals import sqnr_db, worst_row_sqnr_db


def test_sqnr_of_a_known_error():
    x = torch.ones(4, 8)
    assert sqnr_db(x, x * 0.9) == pytest.approx(20.0, abs=1e-4)
    assert sqnr_db(x, x) == math.inf


def test_worst_row_sees_what_the_global_figure_does_not():
    x = torch.ones(4, 8) * torch.tensor([1.0, 1000.0, 1000.0, 1000.0])[:, None]
    y = x.clone()
    y[0] *= 0.5
    assert sqnr_db(x, y) > 60
    assert worst_row_sqnr_db(x, y) == pytest.approx(6.02, abs=0.01)
    x[1:] = y[1:] = 0  # rows of zeros count for nothing
    assert worst_row_sqnr_db(x, y) == pytest.approx(6.02, abs=0.01)
