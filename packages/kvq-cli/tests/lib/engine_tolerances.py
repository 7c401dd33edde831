"""How far results may differ, and why."""

# Logits of magnitude ~10 after a few layers in float64, sums in another order (1e-12 seen). Norms
# that transformers computes in float32 may round once the other way.
LOGITS_FLOAT64 = 1e-7
