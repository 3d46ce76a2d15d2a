"""``torch-fp8 compare``: runs a training command in BF16 and in FP8, and compares the runs.

The command's own process reads the records (`command`, `trials`, `outcome`, `advice`). The programs
that it starts load `child`, which overrides the precision, records each optimizer step and stops.
"""
