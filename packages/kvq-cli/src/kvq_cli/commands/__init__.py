"""The commands of `kvq`: each parses, calls and prints."""
