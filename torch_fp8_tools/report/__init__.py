"""``torch-fp8 report``: figures and tables of what a run's monitor measured."""
