"""Which tables become tensor trains."""
