"""Jobs on Slurm: client (Slurm's commands), submit, node (the task on each node), outcome (done, failed, requeued)."""
