"""One model on one mesh: how it is sharded, and the train step that every strategy shares."""
