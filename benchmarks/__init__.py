"""Measurements of the whole thing, as real processes; each prints one JSON object as its last line (`report`)."""
