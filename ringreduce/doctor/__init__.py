"""What a machine, a job, a trace or a dump tells people."""
