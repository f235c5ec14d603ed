"""`launch verify`: check that the accumulated gradient is that of one big batch."""
