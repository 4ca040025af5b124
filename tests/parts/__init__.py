"""Updates in parts, end to end: over the wire with a client of bare messages, and as processes."""
