"""Batches that keep every distinct list once, and what is computed on them (RecD)."""
