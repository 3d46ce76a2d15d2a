import importlib.metadata
import re
from pathlib import Path

import pytest
import torch

from _fp8_points import TRIED
from benchmarks import versions
from benchmarks.rows import read_rows
from tests.internals import RECIPES
from torch_fp8.ops.hardware import check_device, runs_natively

ROOT = Path(__file__).resolve().parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()
README = (ROOT / "README.md").read_text().partition("## Install\n")[2].partition("\n## ")[0]
INSTALL = (ROOT / "docs" / "install.md").read_text()
ROWS = read_rows(versions.RESULTS)


@pytest.mark.parametrize("host", ["lightning", "accelerate", "peft"])
def test_pins_are_what_was_tried(host):
    lowest, highest = versions.tried(ROWS, host)
    pinned = re.findall(rf'"(?:pytorch-)?{host}>=([\d.]+),<([\d.]+)"', PROJECT)
    assert pinned
    assert set(pinned) == {(lowest, versions.after(highest))}


def test_the_examples_pin_transformers_that_were_tried():
    """Version 5 alone; scripts of the user's run with version 4 as well."""
    (pinned,) = set(re.findall(r'"transformers>=([\d.]+),<([\d.]+)"', PROJECT))
    five = [row for row in ROWS if row["version"].startswith("5.")]
    assert pinned[1] == versions.after(versions.tried(five, "transformers")[1])
    assert pinned[0] == versions.tried(five, "transformers")[0]


def test_what_is_said_at_run_time_is_what_was_tried():
    assert {host: versions.tried(ROWS, host) for host in TRIED} == TRIED


def test_torch_and_pythons_are_what_was_tried():
    lowest, _ = versions.tried(ROWS, "torch")
    assert f'dependencies = ["torch>={lowest}"]' in PROJECT
    lowest, highest = versions.tried(ROWS, "python")
    assert f'requires-python = ">={lowest}"' in PROJECT
    named = re.findall(r"Programming Language :: Python :: (3\.\d+)", PROJECT)
    ran = {".".join(row["python"].split(".")[:2]) for row in ROWS if row["result"] == "works"}
    assert set(named) == ran
    assert (named[0], named[-1]) == (lowest, highest)


def test_each_combination_has_one_row():
    keys = [versions._key(row) for row in ROWS]
    assert len(keys) == len(set(keys))


def test_documents_show_the_rows():
    shown = (ROOT / "docs" / "versions.md").read_text().split(versions.MARK)
    assert len(shown) == 3
    assert shown[1].strip() == versions.table(ROWS).strip()
    for host in (*TRIED, "torch", "python"):
        lowest, highest = versions.tried(ROWS, host)
        name = "Python" if host == "python" else host
        tried = f"{re.escape(lowest)} to {re.escape(highest)}"
        assert re.search(rf"\| {name}[^|]* \| {tried} \|", INSTALL), host
        assert re.search(rf"\b{name}\s+{tried}\b", README), host


def test_every_host_has_its_newest_release_of_today_in_the_table():
    """At least: what is installed here, which is what the other tests run with."""
    for host in TRIED:
        installed = importlib.metadata.version(host)
        highest = versions.tried(ROWS, host)[1]
        assert versions.minor(installed) <= versions.minor(highest), host


def test_the_newest_releases_are_those_after_what_was_tried():
    hosts = [part.partition("-")[0] for part in versions.NEWEST]
    assert set(hosts) == {*TRIED, "torch"}
    for part, host in zip(versions.NEWEST, hosts, strict=True):
        highest = versions.tried(ROWS, host)[1]
        asked = versions.requirements(versions.parse(part))
        assert asked[0] == f"{host}>={versions.after(highest)}"


def test_the_lowest_the_default_and_the_highest_torch_are_in_the_matrix():
    lowest, highest = versions.tried(ROWS, "torch")
    setup = (ROOT / "scripts" / "setup.sh").read_text()
    (default,) = re.findall(r"^TORCH_VERSION=(\d+\.\d+)", setup, re.MULTILINE)
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert f'torch: ["{lowest}", "{default}", "{highest}"]' in workflow
    assert {f"torch-{v}" for v in (lowest, default, highest)} <= set(versions.PARTS)


CARDS = re.findall(
    r"^\| ([^|]+) \| (sm_[\d, sm_]+) \| ([^|]+) \|$",
    (ROOT / "docs" / "versions.md").read_text(),
    re.MULTILINE,
)


@pytest.mark.parametrize(("cards", "architectures", "recipes"), CARDS)
def test_cards_run_what_the_document_says(cards, architectures, recipes, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: cards)
    for number in re.findall(r"\d+", architectures):
        capability = divmod(int(number), 10)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        device = torch.device("cuda")
        runs = [r for r in RECIPES if runs_natively(device, r)]
        if recipes.startswith("none"):
            with pytest.raises(ValueError, match="no FP8 tensor cores"):
                check_device(device, "tensorwise", emulate=False)
        else:
            assert sorted(runs) == sorted(recipes.split(", "))


def test_the_table_of_cards_is_found():
    assert len(CARDS) == 5
