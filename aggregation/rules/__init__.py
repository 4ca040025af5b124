"""The robust aggregation rules, which examine every update of a round."""
