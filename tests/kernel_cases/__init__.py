"""The one list of shapes and tolerances with which Triton kernels are held against their
references.

The GPU tests and the emulator call these functions. Each raises `comparison.Mismatch` where the
device's result is another than the CPU's. What is tried is passed in, so that a wrong kernel can be
told from a right one on a CPU, too: `checks` has a few of the cases for that.
"""
