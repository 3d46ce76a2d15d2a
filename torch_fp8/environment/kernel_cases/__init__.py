"""The one list of shapes and tolerances with which Triton kernels are held against their
references.

The GPU tests call these functions with all of their cases, ``torch-fp8 env --self-test`` with a
few. Each raises `comparison.Mismatch` where the device's result is another than the CPU's. What is
tried is passed in, so that a wrong kernel can be told from a right one on a CPU, too.
"""
