"""Imports the package by hand. Usage: explicit_import.py before|after|broken|never [PRECISION]"""

import sys
import warnings

when, precision = sys.argv[1], (sys.argv[2] if len(sys.argv) > 2 else "fp8")
if when == "before":
    import accelerate_fp8

import torch  # noqa: E402
import transformers.training_args  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from torch import nn  # noqa: E402

if when == "broken":  # an upstream name that moved
    del Accelerator._prepare_fsdp2
if when in ("after", "broken"):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import accelerate_fp8  # noqa: F401
    print("warnings", *[str(w.message) for w in caught if "FP8" in str(w.message)])

accelerator = Accelerator(mixed_precision=precision, cpu=True)
model = accelerator.prepare(nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)]))
model(torch.randn(16, 32)).sum().backward()
arguments = transformers.training_args.TrainingArguments("out", bf16=True, use_cpu=True)
print("layer", type(model[1]).__module__, "arguments", arguments.mixed_precision)
print("engine imported", any(name.split(".")[0] == "torch_fp8" for name in sys.modules))
