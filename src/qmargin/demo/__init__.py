"""The first run: five losses on synthetic stroke identities, from training to a report."""
