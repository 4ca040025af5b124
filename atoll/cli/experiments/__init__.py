"""What `atoll simulate`, `atoll sweep` and `atoll compare` show of their runs."""
