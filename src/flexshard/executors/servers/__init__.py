"""Rows in the memory of other processes, and other machines, than those that train."""
