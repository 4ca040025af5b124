"""A sampler for cyclic training: one site after the other, by name."""


def in_turn(candidates, count, rng):
    return [each.client_id for each in sorted(candidates, key=lambda each: (each.times_chosen, each.client_id))[:count]]
