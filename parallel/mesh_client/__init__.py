"""A mesh of ranks as one client: its local training, evaluation and statistics, with the numbers of one process."""
