"""Jobs on Slurm: client (Slurm's answers), submit, node (what runs on each node), outcome."""
