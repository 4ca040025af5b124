"""The sources of an evaluation row: the server, all clients together, or one client, by evaluation or by training."""

WHOLE = ("server", "clients")
"""The sources of evaluations whose sums are over all data; such rows always stay."""

SITE = "site:"
"""The beginning of the source of one client's evaluation; its id follows."""

TRAINING = "training:"
"""The beginning of the source of one client's training from a version; its id follows."""
