"""Measurements against the paper and against other tools."""
