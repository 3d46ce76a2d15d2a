"""What a run's FP8 looks like from inside: statistics, alarms, ways back, and a page to look at."""
