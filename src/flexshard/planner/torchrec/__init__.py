"""A plan as TorchRec's ``DistributedModelParallel`` takes it."""
