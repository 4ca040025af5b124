"""Statistics of a site's data before a training: counts, label histograms, exact moments, custom sums."""
