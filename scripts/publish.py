"""The project's address and version, each from one setting, and the files derived from them.

``repository`` below ``[tool.torch-fp8]`` in pyproject.toml is the address of the public repository.
While it is empty, nothing names an address: the metadata have no URLs, the long description's
pictures and links into the repository are left out, and the site has no link to it.

``python scripts/publish.py write`` copies both settings into mkdocs.yml and CITATION.cff.
``python scripts/publish.py check dist/*`` lists what these files lack for a release.
"""

import re
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_IN_SDIST = ("CHANGELOG.md", "CITATION.cff", "tests/test_docs.py", "docs/index.md")


def setting(name: str) -> str:
    """Return a string of pyproject.toml by its name, empty if there is none."""
    found = re.search(rf'^{name} = "(.*)"$', PROJECT, re.MULTILINE)
    return found[1] if found else ""


def repository() -> str:
    """Return the address of the repository, empty while it is not known."""
    return setting("repository").rstrip("/")


def project_urls() -> dict[str, str]:
    """Return the URLs of the metadata, none while the repository is not known."""
    address = repository()
    if not address:
        return {}
    return {
        "Repository": address,
        "Documentation": f"{address}/blob/v{setting('version')}/docs/index.md",
        "Changelog": f"{address}/blob/v{setting('version')}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def long_description() -> str:
    """Return README.md with links and pictures that work outside the repository."""
    address, tag = repository(), f"v{setting('version')}"
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    def absolute(found: re.Match[str]) -> str:
        picture, label, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        if not address:
            return "" if picture else label
        return f"{picture}[{label}]({address}/{'raw' if picture else 'blob'}/{tag}/{target})"

    text = _LINK.sub(absolute, text)
    return text.replace("<repository>", address) if address else text


def written() -> dict[Path, str]:
    """Return the files that repeat the settings, with the lines that they have to have."""
    address, version = repository(), setting("version")
    lines = {
        "mkdocs.yml": [f"copyright: torch-fp8 {version}", address and f"repo_url: {address}"],
        "CITATION.cff": [f"version: {version}", address and f"repository-code: {address}"],
    }
    texts = {}
    for name, wanted in lines.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        (first, second) = wanted
        key = first.partition(":")[0]
        of_address = "repo_url" if name == "mkdocs.yml" else "repository-code"
        text = re.sub(rf"^{of_address}:.*\n", "", text, flags=re.MULTILINE)
        both = "\n".join(filter(None, [first, second]))
        texts[ROOT / name] = re.sub(rf"^{key}:.*$", both, text, flags=re.MULTILINE)
    return texts


def missing(files: list[Path]) -> list[str]:
    """Return what these files lack for a release."""
    version, found = setting("version"), []
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        found.append(f"pyproject.toml: {version!r} is not a release version")
    if f"## {version} " not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        found.append(f"CHANGELOG.md has no section for {version}")
    for path, text in written().items():
        if path.read_text(encoding="utf-8") != text:
            found.append(f"{path.name} differs from pyproject.toml: run publish.py write")
    if not repository():
        found.append('pyproject.toml: [tool.torch-fp8] repository = "" names no address')
    for file in (file for file in files if file.name.endswith(".tar.gz")):
        with tarfile.open(file) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
        found += [f"{file.name} has no {name}" for name in _IN_SDIST if name not in names]
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["write"]:
        for path, text in written().items():
            path.write_text(text, encoding="utf-8")
        sys.exit()
    lacks = missing([Path(name) for name in sys.argv[2:]])
    print("\n".join(lacks) or "nothing is missing")
    sys.exit(bool(lacks))
