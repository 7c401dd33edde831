"""CUDA kernels that decode a packed cache in registers."""
