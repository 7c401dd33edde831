"""What can be wrong with what a caller hands to a codec."""


class CodecError(ValueError):
    """Base of every error this package raises on bad input."""


class UnknownCodecError(CodecError):
    """No codec is registered under the name given."""


class RowError(CodecError):
    """Rows that a codec cannot encode: head_dim, dtype or shape."""


class PlaneError(CodecError):
    """Planes or blocks that do not match a codec's layout: name, shape or dtype."""
