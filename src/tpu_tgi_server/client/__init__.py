"""A small client that speaks to the shard directly, for people without a router. It knows only the wire format."""
