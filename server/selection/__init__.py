"""The pure selection of a cohort: samplers, Oort, weighted draws."""
