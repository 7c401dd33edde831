"""One file per format: SPEC, encode, decode."""
