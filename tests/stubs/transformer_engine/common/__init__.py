"""Common to all frameworks."""
