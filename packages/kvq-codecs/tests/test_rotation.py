"""The rotation against quaternion algebra done in float64."""

from __future__ import annotations

import array_api_compat.numpy as xp
import numpy as np

from kvq_codecs import rotation

from . import tolerances


def test_each_group_is_multiplied_from_the_left_by_its_quaternion() -> None:
    values = np.random.default_rng(0).standard_normal((128, 3)).astype(np.float32)
    got = rotation.hamilton(xp, rotation.QUATERNIONS, values)
    for group in range(32):
        w, *xyz = rotation.QUATERNIONS[group].astype(np.float64)
        for block in range(3):
            a, *bcd = values[4 * group : 4 * group + 4, block].astype(np.float64)
            scalar = w * a - np.dot(xyz, bcd)
            vector = w * np.array(bcd) + a * np.array(xyz) + np.cross(xyz, bcd)
            want = np.array([scalar, *vector])
            np.testing.assert_allclose(
                got[4 * group : 4 * group + 4, block], want, rtol=0, atol=tolerances.ROTATED_ATOL
            )


def test_the_conjugate_undoes_the_rotation() -> None:
    values = np.random.default_rng(1).standard_normal((128, 5)).astype(np.float32)
    turned = rotation.hamilton(xp, rotation.QUATERNIONS, values)
    np.testing.assert_allclose(
        rotation.hamilton(xp, rotation.CONJUGATES, turned),
        values,
        rtol=0,
        atol=tolerances.ROTATED_ATOL,
    )


def test_sums_run_from_the_first_value_to_the_last() -> None:
    values = np.float32([2**24, 1, 1, 1, -(2**24)]).reshape(5, 1)
    assert rotation.ordered_sum(values)[0] == 0  # each 1 is lost, one after the other
    assert rotation.ordered_sum(values[::-1])[0] == 3  # from −2²⁴ up, none is
