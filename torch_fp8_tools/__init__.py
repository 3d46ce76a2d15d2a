"""The command ``torch-fp8``, and what only it uses. The engine `torch_fp8` imports nothing of it.

`env` describes and tests a machine, `plan` estimates a run, `check` proposes a recipe for each
layer, `compare` runs a training command in BF16 and in FP8, `report` draws what the monitor
measured, and `commands` are those for files.
"""

__all__: list[str] = []
"""No name is public: `torch_fp8.plan` is that of the engine."""
