"""The root process talks to its agents here: messages, the root's end, the agents' end, and supervision."""
