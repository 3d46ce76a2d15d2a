"""``torch-fp8 env``: a description of the machine, and a self-test of everything on it.

This is the only package of the engine that looks at hosts, and only on request; it imports them by
name in separate processes. `versions`, `cards`, `autoload` and `hosts` describe the machine, and
`smoke` is the self-test.
"""
