"""Commands that run on a login node over ssh: cluster.login."""
