"""`launch doctor`: is this machine, or the cluster, fit to run? Probes ask the machines, pure functions judge."""
