"""precision=float8: linear layers that multiply in float8, by torchao."""
