"""What can be wrong with what a caller hands to an attention op."""


class AttentionError(ValueError):
    """Base of every error this package raises on bad input."""


class TensorError(AttentionError):
    """A tensor of the wrong shape, dtype or kind."""


class DeviceError(AttentionError):
    """Tensors of one call that do not lie on one device."""


class BatchError(AttentionError):
    """Offsets, lengths or tables that contradict each other."""


class SlotError(AttentionError):
    """Slots or pages that the cache does not have."""


class UnsupportedError(AttentionError):
    """No backend that may be used covers what was asked for."""
