"""The console script ``torch-fp8``: starts `torch_fp8_tools.cli`, or says in a line why it cannot.

It is a separate module because importing anything from ``torch_fp8`` imports torch, which fails in
a broken installation, and this command must still explain what is wrong with a machine.
"""

import sys


def main() -> int:
    """Run the command; returns its exit status."""
    try:
        from torch_fp8_tools.cli import main as run
    except Exception as error:
        print(f"torch-fp8 cannot start: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return run()
