"""The processes that share a run: groups, heartbeats, decisions taken together."""
