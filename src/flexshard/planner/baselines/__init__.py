"""What a plan is compared with: the published algorithm, whole tables, TorchRec's planner."""
