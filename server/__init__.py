"""The coordinator: the processes that host runs, from the rules of a round to the ports."""
