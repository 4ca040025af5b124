"""Who holds what: how the pooled data of a task is dealt to its clients, seeded, with a report and a plot."""
