"""The odd tasks, as a user would write them, by kind."""
