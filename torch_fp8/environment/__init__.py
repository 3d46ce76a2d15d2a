"""``torch-fp8 env``: a description of the machine, and the self-test of everything on it.

The one place of the engine that looks at hosts, and only when it is asked; it imports them by name,
in processes of their own. `versions`, `cards`, `autoload` and `hosts` describe the machine;
`self_test` lists the checks, `runner` runs each of them apart from this process.
"""
