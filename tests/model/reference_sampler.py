"""What the sampler should do, written again in NumPy for one row: the slow and obvious way, in float64."""

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float64]


def softmax(scores: Row) -> Row:
    weights = np.exp(scores - scores.max())
    normalised: Row = weights / weights.sum()
    return normalised


def with_repetition_penalty(scores: Row, history: list[int], penalty: float) -> Row:
    scores = scores.copy()
    for token in set(history):
        scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
    return scores


def with_frequency_penalty(scores: Row, history: list[int], penalty: float) -> Row:
    scores = scores.copy()
    for token in set(history):
        scores[token] -= penalty * history.count(token) / len(history)
    return scores


def with_top_k(scores: Row, k: int) -> Row:
    if k == 0:
        return scores
    kth = sorted(scores, reverse=True)[min(k, len(scores)) - 1]
    return np.where(scores >= kth, scores, -np.inf)


def with_top_p(scores: Row, p: float) -> Row:
    if p >= 1:
        return scores
    probabilities = softmax(scores)
    kept = np.full_like(scores, -np.inf)
    mass = 0.0
    for token in np.argsort(-probabilities):
        if mass >= p:
            break
        kept[token] = scores[token]
        mass += probabilities[token]
    return kept


def with_typical_p(scores: Row, p: float) -> Row:
    if p >= 1:
        return scores
    probabilities = softmax(scores)
    possible = np.flatnonzero(probabilities > 0)
    surprise = {token: -np.log(probabilities[token]) for token in possible}
    entropy = sum(probabilities[token] * surprise[token] for token in possible)
    kept = np.full_like(scores, -np.inf)
    mass = 0.0
    for token in sorted(possible, key=lambda token: abs(surprise[token] - entropy)):
        if mass >= p:
            break
        kept[token] = scores[token]
        mass += probabilities[token]
    return kept
