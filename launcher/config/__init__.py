"""What a user can set, and how Hydra composes it."""
