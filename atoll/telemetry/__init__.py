"""The metrics of a process for Prometheus and OpenTelemetry, and the traces of rounds."""
