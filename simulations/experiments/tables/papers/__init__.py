"""What papers report, run here: each module is one paper's table, and writes it into `docs/papers.md`."""
