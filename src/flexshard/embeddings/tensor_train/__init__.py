"""Tables as products of small cores (EL-Rec)."""
