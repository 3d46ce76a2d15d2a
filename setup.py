"""Set the metadata that depends on where the project is published; see scripts/publish.py.

Everything else is in pyproject.toml.
"""

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).resolve().parent / "scripts"))

from publish import long_description, project_urls

setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    project_urls=project_urls(),
)
