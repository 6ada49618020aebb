"""Which algorithm and path a call takes: the table of rules, and what tuning puts in its place."""
