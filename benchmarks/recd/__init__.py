"""Deduplicated batches, from storage to training."""
