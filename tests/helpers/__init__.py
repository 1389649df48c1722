"""What several tests share: the definition, error budgets and rows worth testing."""
