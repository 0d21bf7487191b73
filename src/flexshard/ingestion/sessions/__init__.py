"""Datasets of sessions: clustered, and what they repeat."""
