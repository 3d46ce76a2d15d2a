"""Random combinations of models, options, optimizers and loops have the properties of all.

``pytest -m slow tests/test_random_combinations.py`` checks more of them, and
``python -m tests.random_properties 1000 2000`` those of any seeds.
"""

import pytest
import torch

from tests.random_programs import draw
from tests.random_properties import check

COMPILED = pytest.param(3074, marks=pytest.mark.long)
QUICK = (3067, 3072, COMPILED, 3106, 3110, 3116)
"""All levels, five recipes, adapters, tied weights, checkpoints, averages, and Muon."""


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", QUICK)
def test_a_program_has_all_properties(seed):
    assert check(draw(seed)) == "ran"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(100))
def test_more_programs_have_all_properties(seed):
    program = draw(seed)
    assert check(program).startswith(("ran", "refused: ")), program
