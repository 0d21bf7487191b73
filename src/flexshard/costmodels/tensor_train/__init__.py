"""Tensor-train tables: what a batch reads, the work that it takes, its time at measured rates."""
