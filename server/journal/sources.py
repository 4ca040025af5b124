"""The sources of an evaluation row: the server, all clients together, or one client, by evaluation or by training."""

IN_SUMS = "training"
"""Source of the training from a version by all members of secure sums: nothing of a single one is known."""

WHOLE = ("server", "clients", IN_SUMS)
"""Sources of evaluations whose sums are over all data; such rows are always kept."""

SITE = "site:"
"""Prefix of the source of one client's evaluation, followed by its id."""

TRAINING = "training:"
"""Prefix of the source of one client's training from a version, followed by its id."""
