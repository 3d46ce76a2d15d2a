"""The Triton kernels.

Each module of `torch_fp8.ops` that runs on CUDA has a launcher module of the same name in this
package. Kernels are next to their launchers, or in `*_kernels.py`; the code they share (rounding,
codecs, random bits) is in modules of its own. Only this package imports Triton, and it is imported
with the first CUDA tensor.
"""
