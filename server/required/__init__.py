"""The files that the journal requires: which these are, and the check that each is there and undamaged."""
