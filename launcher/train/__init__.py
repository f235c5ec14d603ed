"""The worker wing: what one rank does. It meets the control wing in plan.json, and nowhere else."""
