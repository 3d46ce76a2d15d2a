"""`is_saved`: whether a backward will read a tensor, which a step then leaves alone."""

import pytest
import torch

from tests.internals import is_saved


# Inductor saves a view that does not refer to its base.
@pytest.mark.parametrize("read", [lambda x: x, lambda x: x[:, 0], lambda x: x.data[:, 0]])
def test_a_tensor_is_saved_until_its_backward(read):
    x = torch.ones(3, 4)
    assert not is_saved(x)
    y = (torch.ones((), requires_grad=True) * read(x)).sum()
    assert is_saved(x)
    y.backward()
    assert not is_saved(x)
