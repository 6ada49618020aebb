"""Observes a rank: trace, metrics, the record of its run, live status, flight recorder."""
