"""Many runs from one command: which cells a sweep has, which run each of them has, how they are begun."""
