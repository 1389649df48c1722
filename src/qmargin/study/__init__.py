"""Studies of losses: one recipe for all, the same effort for each, tested on other identities."""
