"""A plan on a real TorchRec model. Empty so far: plans are made and explained, not yet executed."""

__all__: list[str] = []
