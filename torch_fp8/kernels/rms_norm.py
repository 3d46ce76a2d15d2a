"""RMSNorm on CUDA: the twin of `torch_fp8.rms_norm`."""
