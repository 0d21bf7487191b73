"""Parameters, optimizer states, checkpoints, and moving to another plan."""
