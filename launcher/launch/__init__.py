"""Launch of a planned job: on this machine, on several hosts, or through Slurm. No torch at module level."""
