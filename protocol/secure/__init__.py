"""The messages and the mathematics of a secure sum, which both sides share. Pure."""
