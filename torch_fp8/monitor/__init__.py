"""FP8 statistics of a training run, alarms, and automatic fallbacks."""
