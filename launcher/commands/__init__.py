"""The verbs of `launch`, each a function of its arguments that returns the exit status."""
