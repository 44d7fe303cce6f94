"""A text-generation-inference model shard for Google TPUs.

One request travels through the rooms in this order, and imports go the same way only:
cli, config -> service -> mailbox -> engine -> model -> runtime.
"""

__version__ = "0.1.0"
