"""Planning: validated config -> frozen RunPlan, with all decisions before the start. Imports no torch."""
