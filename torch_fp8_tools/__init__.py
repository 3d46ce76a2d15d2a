"""The command ``torch-fp8``, and what only it uses. The engine `torch_fp8` imports only `plan`.

`env` describes and tests a machine, `plan` estimates a run, `compare` runs a training command in
BF16 and in FP8, and `report` draws what the monitor measured. `export_checkpoint` and
`stock_states` convert files.
"""

__all__: list[str] = []
"""No name is public: `torch_fp8` exports `plan`."""
