"""The commands ``torch-fp8 export`` and ``torch-fp8 convert-optimizer``."""
