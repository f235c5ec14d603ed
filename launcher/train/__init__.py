"""Code of the workers. plan.json is all that they read from the control side."""
