"""``python -m torch_fp8`` runs the command ``torch-fp8``."""

import sys

from _fp8_command import main

if __name__ == "__main__":
    sys.exit(main())
