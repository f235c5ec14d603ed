"""Config -> RunPlan: everything decided before the start. No torch, nothing is started."""
