"""Memory, bytes on the wire and time of a training run, counted before a GPU is rented."""
