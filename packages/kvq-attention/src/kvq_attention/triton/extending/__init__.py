"""Extend: attention over a step's own keys and values and the packed tokens before them."""
