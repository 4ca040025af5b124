"""Supervision of a crew (the ranks that train one client): launcher, shared folder, settings. No import of torch."""
