"""The files that the journal requires: the list of them, and the check that each exists undamaged."""
