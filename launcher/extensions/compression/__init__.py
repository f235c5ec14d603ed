"""strategy.compress=powersgd: gradients sent as low-rank factors."""
