"""Plans of the families of models: which layers store what, in which tier."""

from kvq_pools.families.compressed import qsa
from kvq_pools.families.latent import dsa, mla
from kvq_pools.families.layers import Layout, heads_per_rank
from kvq_pools.families.plain import hybrid_swa, mha

__all__ = ["Layout", "dsa", "heads_per_rank", "hybrid_swa", "mha", "mla", "qsa"]
