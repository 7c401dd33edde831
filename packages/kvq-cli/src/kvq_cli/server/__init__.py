"""An OpenAI-compatible HTTP server over an engine."""
