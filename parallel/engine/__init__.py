"""The engine that trains one model on one mesh: its sharding, and the train step that all strategies share."""
