"""Model architectures and their weights."""
