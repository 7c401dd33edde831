"""The Triton backend: one set of kernels for every format, a file of jit functions per format."""
