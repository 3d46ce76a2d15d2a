"""``python -m tests.golden.record``: records the bits that test_golden.py compares with, anew.

That is legitimate where bits change on purpose: another rounding, another order of sums, another
release of torch. A move of code, another name or a new option is none of these. The commit that
brings the new file says which recorded runs changed and why, and shows that training is as good as
it was.
"""

import torch

from tests.golden import cases, comparison, ranks


def main() -> None:
    torch.set_num_threads(1)
    made = {name: cases.recorded(case) for name, case in cases.CASES.items()}
    made |= ranks.recorded_on_ranks()
    comparison.write(
        {
            "machine": comparison.machine(),
            "stock": comparison.as_text(comparison.stock()),
            "runs": comparison.as_text(made),
        }
    )
    print(f"{len(made)} runs are recorded in {comparison.FILE.name}")


if __name__ == "__main__":
    main()
