"""The modules under test import one another by their folder, as scripts do."""

import sys
from pathlib import Path

COMPARISON = Path(__file__).resolve().parents[2] / "benchmarks/comparison"
sys.path.insert(0, str(COMPARISON))
