"""What a cache format costs in quality: measured through the pool and the attention that serve."""
