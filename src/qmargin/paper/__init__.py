"""The paper, mapped: where everything it says is in the code, and commands that make its tables."""
