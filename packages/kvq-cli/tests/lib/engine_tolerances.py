"""How far results may differ, and why."""

# Logits of magnitude ~10 after a few layers in float64, sums in another order (1e-12 seen). Norms
# that transformers computes in float32 may round once the other way.
LOGITS_FLOAT64 = 1e-7

# Logits over a cache of 6 to 8 bits a value against those over rows as they came; without a layer's
# scales they are 0.5 and more apart.
PACKED_LOGITS = 0.3

# Logits in bfloat16 of a step that is padded to the size of a graph against those of the step
# itself: products of matrices of other sizes are summed in another order.
LEAST_COSINE = 0.995
