"""What goes over the wire in a step."""
