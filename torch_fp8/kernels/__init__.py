"""The Triton kernels.

Each module of `torch_fp8.ops` that runs on CUDA has a launcher module of the same name in this
package; the kernels are in `*_kernels.py`, and the code they share (rounding, codecs, random bits)
in modules of its own. Only this package imports Triton, and it is imported with the first CUDA
tensor.
"""
