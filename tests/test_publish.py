import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scripts import publish

ROOT = Path(__file__).resolve().parent.parent
ADDRESS = "https://example.org/team/torch-fp8"


@pytest.fixture
def published(monkeypatch):
    """As if the project's address were known."""
    project = publish.PROJECT.replace('repository = ""', f'repository = "{ADDRESS}"')
    assert ADDRESS in project
    monkeypatch.setattr(publish, "PROJECT", project)


def test_without_an_address_nothing_names_one():
    assert publish.project_urls() == {}
    text = publish.long_description()
    assert "](docs/" not in text
    assert "![" not in text
    assert "](#" not in text


def test_links_and_pictures_of_the_long_description_work_elsewhere(published):
    text = publish.long_description()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links
    for link in links:
        assert link.startswith(("https://", "http://")), link
        path = link.partition(f"{ADDRESS}/blob/v{publish.setting('version')}/")[2]
        assert not path or (ROOT / path.partition("#")[0]).exists(), link
    assert f"{ADDRESS}/raw/v" in text
    assert "<repository>" not in text
    assert set(publish.project_urls()) == {"Repository", "Documentation", "Changelog", "Issues"}


def test_site_and_citation_have_the_settings():
    for path, text in publish.written().items():
        assert path.read_text() == text, f"{path.name}: python scripts/publish.py write"


def test_an_address_reaches_site_and_citation(published):
    texts = {path.name: text for path, text in publish.written().items()}
    assert yaml.safe_load(texts["CITATION.cff"])["repository-code"] == ADDRESS
    assert f"\nrepo_url: {ADDRESS}\n" in texts["mkdocs.yml"]


def test_the_changelog_has_a_section_of_the_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(publish.setting('version'))}\b", text, re.M)


def test_issue_templates_ask_for_the_environment():
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    for name in ("bug.yml", "feature.yml"):
        content = yaml.safe_load((folder / name).read_text())
        labels = [item["attributes"].get("label", "") for item in content["body"]]
        assert any("torch-fp8 env" in label for label in labels), name


def test_the_workflow_runs_what_ci_runs_on_the_pythons_that_are_promised():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert {"run": "./.ci/run"} in jobs["tests"]["steps"]
    promised = re.findall(r"Programming Language :: Python :: (3\.\d+)", publish.PROJECT)
    matrix = jobs["wheel"]["strategy"]["matrix"]
    assert matrix["python"] == promised
    assert {"lightning", "accelerate", "peft", "report", "commands"} <= set(matrix["extra"])


@pytest.mark.long
def test_the_sdist_holds_its_tests_and_the_changelog(tmp_path):
    """Built by setuptools without isolation, from a copy: nothing is downloaded."""
    copy = tmp_path / "copy"
    names = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            target = copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    code = "from setuptools.build_meta import build_sdist; print(build_sdist('dist'))"
    subprocess.run([sys.executable, "-c", code], cwd=copy, check=True, capture_output=True)
    (sdist,) = (copy / "dist").glob("*.tar.gz")
    lacks = [text for text in publish.missing([sdist]) if text.startswith("torch_fp8-")]
    assert lacks == []
