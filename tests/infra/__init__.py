"""Harness of the tests: hosts, a Slurm cluster, runs that exist, checkpoints read back."""
