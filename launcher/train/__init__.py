"""What the workers run. They read plan.json and nothing else of the control side."""
