"""Jobs over several hosts without a scheduler: `cluster=hosts`."""
