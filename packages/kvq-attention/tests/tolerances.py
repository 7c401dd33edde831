"""Every tolerance of this package's tests, and why it is not zero.

Errors are ‖output − reference‖ / ‖reference‖ per (token, head), the reference being attention in
float64 over the decoded cache: the codec's own error is not in them.
"""

import torch

from kvq_attention.accuracy import MAX_ERROR

OUTPUT = {
    # Scores and sums are float32; random values nearly cancel, so a mean of hundreds is small
    # beside its terms. 1e-6 is usual here, the law for every kernel is 2e-3.
    torch.float32: 2e-5,
    # Rounding the output to 11 bits costs up to 4.9e-4; the law is 2e-3.
    torch.float16: 2e-3,
    # Rounding the output to 8 bits costs up to 1.95e-3; the law is 4e-3.
    torch.bfloat16: 4e-3,
    # Nothing but the order of float64 sums differs.
    torch.float64: 1e-12,
}

# What kernels promise; the reasons are there.
KERNEL = MAX_ERROR

# Two orders of summing the same float32 products (other cuts, other blocks).
REORDERED = 2e-5

# A past that is read packed instead of as it came moves outputs by what its codec loses of values,
# and by what it loses of keys through scores of the order of 1: about as much again. Times the
# codec's relative rms on Gaussian rows; of all outputs together, 1.4 at most was seen.
PACKED_PAST = 2.0

# A wrong scale must move the output by far more than any kernel's error (2e-3).
WRONG_SCALE_MIN = 0.1
