"""What a plan moves: predicted, observed, replayed."""
