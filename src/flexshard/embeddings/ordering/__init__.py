"""A table's rows in another order."""
