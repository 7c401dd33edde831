"""Every tolerance of this package's tests, and why it is not zero."""

# Relative rms of any codec on Gaussian rows: iso3, the coarsest, is at 0.184.
RELATIVE_RMS_MAX = 0.2

# Published figures come from other random rows: 120,000 there, 2,048 here, printed to 2–3 digits.
PUBLISHED_FIGURE_RTOL = 0.02

# Half a bf16 step of values below 4 (2⁻⁷); a reinterpreted word would be off by more than 1.
BF16_STEP_BELOW_4 = 2**-7

# Four products of float32 values below 5 and their sums, against the same in float64.
ROTATED_ATOL = 1e-5
