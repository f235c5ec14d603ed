"""Optional parts of the launcher. The core imports none of them: it finds them by entry points."""
