"""From a validated config to the frozen RunPlan: all decisions before the start. Imports no torch, starts nothing."""
