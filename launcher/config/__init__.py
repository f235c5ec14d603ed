"""Configuration: the keys that a user can set, and their composition by Hydra."""
