"""The budgets of a site's data sets: what a request would spend, what was spent, and the one decision about both."""
