"""The programs beside the rounds: the process that a coordinator supervises."""
