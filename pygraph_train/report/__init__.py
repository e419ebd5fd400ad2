"""Why something cannot be captured, where, and what was done instead: the report."""
