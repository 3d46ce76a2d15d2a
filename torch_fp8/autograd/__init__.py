"""Autograd functions, and checkpoints that repeat what was not saved."""
