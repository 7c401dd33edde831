"""What a model and a command line ask of the cache. Hugging Face key names live here only."""

from kvq_cli.config.declared import choose_format, declared_cache
from kvq_cli.config.errors import CacheFormatError, ConfigError, UnsupportedModel
from kvq_cli.config.families import PLANNED, SERVED, check_servable, filled_in, geometry, token_ids
from kvq_cli.config.formats import (
    CacheFormat,
    Formats,
    LayerFormats,
    check_format,
    distinct,
    parse_cache_dtype,
    parse_formats,
    parse_layer_dtypes,
    quality_notes,
    split_formats,
)
from kvq_cli.config.geometry import Family, Index, Latent, ModelGeometry, State
from kvq_cli.config.pools import build_plan, pages_per_request
from kvq_cli.config.rotary import rotary_notes
from kvq_cli.config.workspace import Workspace, kernels_serve, usual_requests, workspace

__all__ = [
    "PLANNED",
    "SERVED",
    "CacheFormat",
    "CacheFormatError",
    "ConfigError",
    "Family",
    "Formats",
    "Index",
    "Latent",
    "LayerFormats",
    "ModelGeometry",
    "State",
    "UnsupportedModel",
    "Workspace",
    "build_plan",
    "check_format",
    "check_servable",
    "choose_format",
    "declared_cache",
    "distinct",
    "filled_in",
    "geometry",
    "kernels_serve",
    "pages_per_request",
    "parse_cache_dtype",
    "parse_formats",
    "parse_layer_dtypes",
    "quality_notes",
    "rotary_notes",
    "split_formats",
    "token_ids",
    "usual_requests",
    "workspace",
]
