"""A handful of properties that decided how weights are held, and how the table judges them."""

import pytest
import torch

from benchmarks.weight_designs import measured, summary, table, verdict
from benchmarks.weight_properties import PROPERTIES, Kit
from benchmarks.weight_prototypes import DESIGNS

HELD_BY_THE_WRAPPER = [
    ("1 reading", "svd"),
    ("2 writing", "decay by hand accumulates"),
    ("2 writing", "view made with grad on"),
    ("3 handing on", "two optimizers and none"),
    ("4 copying", "AveragedModel before conversion"),
    ("5 saving", "safetensors save model tied"),
    ("8 leaving", "make_fx while converted"),
    ("9 higher order", "second order MAML"),
    ("0 a Parameter", "weakref before conversion"),
    ("0 a Parameter", "hooks before conversion"),
]


@pytest.mark.parametrize(("section", "name"), HELD_BY_THE_WRAPPER, ids=lambda text: text)
def test_a_wrapper_gives_what_stock_gives(section, name):
    function = PROPERTIES[section][name]
    outcome, stock = measured("c", function), measured("stock", function)
    assert verdict(outcome, stock, 1e-6 if "MAML" in name else 0.0) == "ok"


def test_a_plain_parameter_outside_its_scope_loses_small_writes():
    function = PROPERTIES["2 writing"]["decay by hand accumulates"]
    stock = measured("stock", function)
    assert verdict(measured("b", function), stock, 0.0).startswith("wrong (weights")
    assert verdict(measured("b in scope", function), stock, 0.0) == "ok"


def test_a_row_names_what_differs():
    value = torch.zeros(2)
    stock = value, ([], [])
    assert verdict((value + 1, ([], [])), stock, 0.0).startswith("wrong (value: relative")
    assert verdict((value.half(), ([], [])), stock, 0.0) == (
        "wrong (value: float16 (2,) for float32 (2,))"
    )
    assert verdict(ValueError("no"), stock, 0.0) == "raises (ValueError: no)"
    assert verdict(NotImplementedError("refused: it"), stock, 0.0) == "refused"


def test_the_summary_counts_what_is_right_or_refused():
    rows = [{"section": "1", "property": "x", **dict.fromkeys(DESIGNS, "ok"), "a": "wrong (x)"}]
    (all_sections,) = [row for row in summary(rows) if row["section"] == "all"]
    assert (all_sections["rows"], all_sections["a"], all_sections["c"]) == (1, 0, 1)


def test_a_section_has_a_row_for_each_property():
    rows = table(["6 optimizer state"])
    assert {row["property"] for row in rows} == set(PROPERTIES["6 optimizer state"])
    assert all(row["c"] == "ok" for row in rows)


def test_every_conversion_is_exact():
    for design in DESIGNS.values():
        kit, plain = Kit(design), Kit(design, convert=False)
        with kit.scopes:
            assert torch.equal(design.joined(kit.p), plain.p)
