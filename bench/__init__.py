"""The benchmark of `make bench`: real servers, real clients, and transformers beside them, compared within one run."""
