"""The model and its graphs: weights, attention over the slot cache, sampling. It knows no requests and no text."""
