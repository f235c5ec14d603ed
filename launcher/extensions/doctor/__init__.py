"""`launch doctor`: checks whether this machine or the cluster can run jobs. Probes collect facts, functions judge."""
