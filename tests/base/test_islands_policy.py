"""What a user can get wrong in [islands] is one line with the nearest right value."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.base.errors import ConfigError
from shoal.base.layouts.island_options import DEFAULTS, METHODS, WORDS, IslandsPolicy
from shoal.base.layouts.trimmed_mean import least_trim
from shoal.fabric.islands.compressed_all_reduce import MergeRule, merge_rows

TRIMMED = {"method": "fedavg", "merge": "trimmed"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"method": "dilco"}, "islands.method = dilco: not one of"),
        (
            {"count": 2},
            "islands.count = 2: how islands merge is not said; try: islands.method=",
        ),
        ({"method": "diloco", "codec": "int4"}, "try: int8"),
        ({"method": "diloco", "fragments": 4}, "try: islands.method=streaming-diloco"),
        (
            {"method": "streaming-diloco", "period": 8, "fragments": 9},
            "try: islands.fragments=8",
        ),
        ({"method": "streaming-diloco", "period": 8, "overlap": 2}, "try: islands.overlap=1"),
        ({"method": "diloco", "mixing": 1.0}, "try: islands.mixing=0.5"),
        ({"method": "diloco", "count": 2, "index": 2}, "try: islands.index=1"),
        ({"method": "diloco", "count": 2, "at": "here"}, "HOST:PORT is wanted"),
        ({"method": "diloco", "count": 6, "regions": 4}, "try: islands.regions=3"),
        ({"method": "diloco", "period": -1}, "islands.period = -1: at least 1"),
        ({"method": "diloco", "weighting": "token"}, "try: tokens"),
        (
            {"data": "own"},
            "islands.data = own: how islands merge is not said; try: islands.method=",
        ),
        ({"data": "owns"}, "islands.data = owns: not one of shared, own; try: own"),
        ({"method": "fedavg", "sample": 0.5}, "try: islands.data=own"),
        ({"method": "fedavg", "concurrent": 2, "count": 4}, "try: islands.data=own"),
        ({"method": "scaffold", "count": 2}, "try: islands.data=own, or islands.method=fedavg"),
        ({"method": "noloco", "data": "own"}, "try: islands.method=fedavg"),
        ({"method": "streaming-diloco", "data": "own"}, "try: islands.fragments=1"),
        ({"method": "scaffold", "data": "own", "weighting": "samples"}, "try: islands.weighting="),
        ({"method": "fedavg", "data": "own", "sample": 1.5}, "above 0 and at most 1; try: islands"),
        ({"method": "fedavg", "merge": "trimmed", "trim": 0.5}, "at most 0.49; try: islands.trim="),
        ({"method": "fedavg", "merge": "medain"}, "try: median"),
        *[
            ({**TRIMMED, **keys}, said)
            for keys, said in (
                (
                    {"count": 4},
                    "islands.trim = 0.2: drops none of 4 changes at each end, so one wrong "
                    "change counts in full (islands.count = 4); try: islands.trim=0.25",
                ),
                ({"count": 3}, "try: islands.trim=0.334"),
                (
                    {"count": 2},
                    "of 2 changes at a time (islands.count = 2) none can be dropped at each "
                    "end; try: islands.merge=mean",
                ),
                (
                    {"count": 40, "sample": 0.1, "data": "own"},
                    "of 4 changes at each end, so one wrong change counts in full (islands.sample = 0.1 "
                    "of 40 owners); try: islands.trim=0.25",
                ),
                (
                    {"count": 6, "least": 4},
                    "(islands.least = 4: a round may have so few); try: islands.trim=0.25",
                ),
                (
                    {"count": 8, "regions": 2},
                    "(islands.regions = 2 of 8 islands); try: islands.trim=0.25",
                ),
            )
        ],
        *[({key: "typo"}, f"islands.{key} = typo: not one of") for key in WORDS],
        ({"merge": "medain"}, "try: median"),
    ],
)
def test_one_line_with_the_nearest_right_value(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as told:
        IslandsPolicy(**given).resolved()
    assert said in str(told.value)
    assert "\n" not in str(told.value)


def test_every_method_settles_whatever_the_period() -> None:
    assert set(DEFAULTS) == set(METHODS)
    for method in METHODS:
        for period in (1, 2, 3, 50):
            data = "own" if method == "scaffold" else "shared"
            settled = IslandsPolicy(method, count=2, period=period, data=data).resolved()
            assert settled.resolved() == settled
            assert settled.overlap < settled.period // settled.fragments


def test_the_least_trim_drops_one_change_at_each_end() -> None:
    for changes in range(3, 200):
        trim = least_trim(changes)
        IslandsPolicy("fedavg", merge="trimmed", count=changes, trim=trim).resolved()
        assert int(trim * changes) == 1
        rows = torch.arange(float(changes))[:, None]
        rows[-1] = 1e9
        assert merge_rows(rows, MergeRule("trimmed", trim)).item() < changes
