"""`launch drill`: interrupts the user's job on purpose and compares it with an undisturbed run."""
