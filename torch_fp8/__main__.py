"""``python -m torch_fp8`` runs the command ``torch-fp8``."""

import sys

from torch_fp8.cli import main

if __name__ == "__main__":
    sys.exit(main())
