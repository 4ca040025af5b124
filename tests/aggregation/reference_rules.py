"""Robust rules as their papers write them: slow, in float64, on whole vectors; and the product's on arrays."""

import math
import statistics

import numpy as np

from atoll.aggregation.rules.rule import GeometricRule


def applied(rule, updates, centre=None):
    """Apply a rule to updates in memory: (K, n) float32 -> (n)."""
    rows = updates if centre is None else np.vstack([updates, centre])
    if isinstance(rule, GeometricRule):
        exact = rows.astype(np.float64)
        rows = rule.mixing(exact @ exact.T) @ exact
    return rule.reduce(np.array(rows, np.float32))


def median_twin(updates):
    return np.array([statistics.median(map(float, column)) for column in updates.T])


def trimmed_mean_twin(updates, f):
    return np.array([statistics.fmean(sorted(map(float, column))[f : len(updates) - f]) for column in updates.T])


def krum_scores_twin(updates, f):
    """The sum of the squared distances to the K - f - 2 nearest others."""
    scores = []
    for k, update in enumerate(updates):
        others = [math.dist(update, other) ** 2 for l, other in enumerate(updates) if l != k]  # noqa: E741
        scores.append(sum(sorted(others)[: len(updates) - f - 2]))
    return scores


def multi_krum_twin(updates, f, m):
    scores = krum_scores_twin(updates, f)
    chosen = sorted(range(len(updates)), key=lambda k: scores[k])[:m]
    return np.mean([updates[k].astype(np.float64) for k in chosen], axis=0)


def weiszfeld_twin(updates, num_steps, least):
    point = np.zeros(updates.shape[1])
    for _ in range(num_steps):
        pulls = [1 / max(least, math.dist(update, point)) for update in updates]
        point = sum(pull * update.astype(np.float64) for pull, update in zip(pulls, updates, strict=True)) / sum(pulls)
    return point


def centred_clipping_twin(updates, centre, radius, num_steps):
    point = centre.astype(np.float64)
    for _ in range(num_steps):
        moves = [(update - point) * min(1, radius / math.dist(update, point)) for update in updates]
        point = point + sum(moves) / len(updates)
    return point


def nearest_neighbour_twin(updates, f):
    """Each update replaced by the mean of the K - f nearest, itself among them."""
    exact = updates.astype(np.float64)
    return np.array([np.mean(sorted(exact, key=lambda u: math.dist(u, v))[: len(updates) - f], axis=0) for v in exact])
