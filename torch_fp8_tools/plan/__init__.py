"""Memory, network traffic and step time of a training run, planned before you rent a GPU."""
