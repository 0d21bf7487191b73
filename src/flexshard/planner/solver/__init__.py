"""The optimal placement of rows within a memory budget."""
