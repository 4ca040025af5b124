"""A federation in one process: the deployed machines of both sides under virtual time, with real training and folds."""
