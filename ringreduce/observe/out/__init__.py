"""Where a job is shown: over HTTP, and at collectors of OpenTelemetry."""
