"""AdamW with FP8 states and split weights."""
