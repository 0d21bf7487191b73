"""Batches known ahead: which rows a cache of a rank's own rows holds, and the pipeline that knows them."""
