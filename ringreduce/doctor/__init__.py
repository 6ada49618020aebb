"""Reports on a machine, a job, a trace or a dump."""
