"""The commands about a coordinator's runs, rounds, model versions and aggregation ranks."""
