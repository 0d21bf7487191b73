"""Optimizers of tables: one file for each, and the registry of all."""
