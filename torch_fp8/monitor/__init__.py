"""FP8 statistics of a training run, alarms, automatic fallbacks, and an HTML report."""
