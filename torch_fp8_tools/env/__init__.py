"""``torch-fp8 env``: a description of the machine, and a self-test of everything on it.

Hosts are imported by name, in separate processes, and only on request. `versions`, `cards`,
`autoload` and `hosts` describe the machine, and `smoke` is the self-test.
"""
