"""The classifier over all identities: prototypes, and the ways to take a step with them."""
