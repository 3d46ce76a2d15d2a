"""Memory and network traffic of a training run, planned before you rent a GPU."""
