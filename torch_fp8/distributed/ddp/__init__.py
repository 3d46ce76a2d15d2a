"""FP8 gradient exchange for DistributedDataParallel."""
