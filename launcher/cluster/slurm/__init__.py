"""Jobs of Slurm's: what Slurm says (client), how a job gets there (submit), what runs on each node (node)."""
