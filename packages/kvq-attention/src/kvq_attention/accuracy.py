"""How near to float64 an output must be."""

from __future__ import annotations

import torch

# Largest ‖output − reference‖ / ‖reference‖ of a token and head, the reference being attention in
# float64 over the decoded cache, so that the codec's own error is not in it. Kernels may round
# probabilities and decoded values to 16 bits (4.9e-4 each for float16) and the output once more;
# rounding it to bfloat16 alone reaches 1.95e-3.
MAX_ERROR = {
    torch.float16: 2e-3,
    torch.bfloat16: 4e-3,
    torch.float32: 2e-3,
    torch.float64: 2e-3,
}


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest ‖Δ‖ / ‖expected‖ over the rows of [..., D]; infinite where any is NaN."""
    wanted = expected.double()
    error = (output.to(wanted) - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    return float(error.nan_to_num(nan=torch.inf).max())
