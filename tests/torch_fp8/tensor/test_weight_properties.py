from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.weight_properties import NEAR, PROPERTIES, Kit, Property, Split, Stock

DIFFERENT = {
    "0 a Parameter": {
        "type is Parameter": "a subclass",
        "data ptr is not 0": "nothing is joined for it",
        "data ptr is stable": "nothing is joined for it",
        "numpy write through": "read-only, so that it raises",
        "dlpack write through": "lost, as docs/weights.md says",
    },
    "0 compile": {"writes a weight": "breaks the graph, and fullgraph=True forbids that"},
    "1 reading": {"svd": "torch's other algorithm"},
    "1 reading, autocast": {"svd": "torch's other algorithm"},
}
"""What does not equal float32 weights, and why."""
LONG = ("0 compile", "5 saving", "8 leaving")
SECTIONS = [
    pytest.param(section, marks=pytest.mark.long) if section in LONG else section
    for section in PROPERTIES
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("section", SECTIONS)
def test_a_weight_is_what_float32_is(section, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    different = {}
    for name, function in PROPERTIES[section].items():
        outcomes = [measured(design, function) for design in (Split(), Stock())]
        result = verdict(*outcomes, NEAR.get(f"{section}/{name}", 0.0))
        if result not in ("ok", "refused"):
            different[name] = result
    assert different.keys() == DIFFERENT.get(section, {}).keys(), different


def measured(design: Stock, function: Property) -> Any:
    """Run a property; return its value, the weights and the gradients, or the error."""
    try:
        kit = Kit(design)
        torch.manual_seed(1)
        return kit.plain(function(kit)), kit.weights()
    except Exception as error:
        return error


def verdict(value: Any, reference: Any, near: float) -> str:
    if isinstance(value, Exception):
        # What Dynamo adds names files of the machine.
        text = " ".join(str(value).partition("from user code")[0].split())[:70]
        if isinstance(value, AssertionError):
            return f"wrong ({text})"
        return "refused" if "refused" in text else f"raises ({type(value).__name__}: {text})"
    if isinstance(reference, Exception):
        return "ok"
    for label, got, want in zip(
        ("value", "weights", "gradients"), _parts(value), _parts(reference), strict=True
    ):
        if text := _difference(got, want, near):
            return f"wrong ({label}: {text})"
    return "ok"


def _parts(outcome: Any) -> tuple[Any, Any, Any]:
    value, (weights, grads) = outcome
    return value, weights, grads


def _difference(got: Any, want: Any, near: float) -> str:
    a, b = pytree.tree_leaves(got), pytree.tree_leaves(want)
    if len(a) != len(b):
        return f"{len(a)} for {len(b)}"
    for x, y in zip(a, b, strict=True):
        if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
            if not isinstance(x, torch.Tensor) and x == y:
                continue
            return f"{str(x)[:40]} for {str(y)[:40]}"
        if x.dtype != y.dtype or x.shape != y.shape:
            return f"{x.dtype} {tuple(x.shape)} for {y.dtype} {tuple(y.shape)}".replace(
                "torch.", ""
            )
        if not (x.isnan() | (x == y)).all():
            far = float((x.double() - y.double()).norm() / y.double().norm().clamp(min=1e-300))
            if not far <= near:
                return f"relative difference {far:.0e}"
    return ""
