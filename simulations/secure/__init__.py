"""Secure sums in virtual time: members of simulated sites, with or without masks, and encoded updates."""
