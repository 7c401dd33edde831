"""iso4 against the ggml C reference."""

from __future__ import annotations

import numpy as np

from kvq_codecs import rotation
from kvq_codecs.formats import iso4

from .. import golden_vectors
from ..backends import Backend, on_each_backend


@on_each_backend
def test_bytes_and_values_are_the_reference_ones(backend: Backend) -> None:
    golden_vectors.check_iso("iso4", backend)


def test_tables_are_the_reference_ones() -> None:
    tables = golden_vectors.iso_tables()
    for ours, theirs in (
        (iso4.CENTROIDS, "centroids_iso4"),
        (iso4.THRESHOLDS, "thresholds_iso4"),
        (rotation.QUATERNIONS, "quaternions_wxyz"),
    ):
        assert ours.view(np.uint32).tolist() == tables[f"{theirs}_f32bits"]
    smallest = np.float32(rotation.SMALLEST_NORM).view(np.uint32)
    assert int(smallest) == tables["norm_eps_f32bits"]
