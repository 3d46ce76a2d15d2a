"""SwiGLU on CUDA: the twin of `torch_fp8.swiglu`."""
