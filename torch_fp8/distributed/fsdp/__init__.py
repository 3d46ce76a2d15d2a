"""FP8 all-gathers of weights and reduce-scatters of gradients for FSDP2."""
