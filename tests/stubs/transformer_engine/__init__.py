"""Transformer Engine's interface as far as torch_fp8 uses it, in plain torch, on any device.

Signatures are those of 2.20.2; `tests/torch_fp8/nn/test_transformer_engine.py` compares them with
an installed release. GEMMs run in high precision. What has caught out integrations is as in the
original: te.Linear makes parameters and an extra state of its own, refuses several dtypes outside
autocast and numbers of tokens that cuBLAS does not take; delayed scaling is global.
"""

__version__ = "2.20.2"
