"""FP8 statistics of a training run, alarms, automatic fallbacks, and the report of a run."""
