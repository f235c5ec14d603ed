"""`launch verify` in the workers: is the accumulated gradient that of one big batch? Each rank runs ``worker``."""
