"""The batches of one client's rows: fetched, drawn by seed, divided by their examples, and counted in units."""
