"""What the server would run on a TPU, compiled for one without one: memory, traffic, and what follows from them."""
