"""Jobs of Slurm's: what Slurm says (client), how a job gets there (submit, refusal), what runs on each node (node,
route), and what becomes of it (ending, failures)."""
