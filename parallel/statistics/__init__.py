"""Statistics of a site's data before a training: counts, label histograms, exact moments, the task's own sums.

Imports: `task` and `local_training`. `exact`, `parts` and `merging` import no torch: the coordinator and the agents use
them.
"""
