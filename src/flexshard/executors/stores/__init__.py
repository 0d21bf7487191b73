"""The rows that a rank holds, and how they are updated."""
