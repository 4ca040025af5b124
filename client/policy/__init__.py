"""The policy of a site's data owner: rules that no coordinator can weaken, and the log of every decision."""
