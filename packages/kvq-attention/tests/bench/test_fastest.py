import json
import sys
from dataclasses import replace

import pytest

from kvq_attention.bench import fastest
from kvq_attention.bench.fastest import Kind
from kvq_attention.crossovers import Region


def record(
    times, *, bf16=100.0, case="8x4k", codec="q4_0", page=16, shapes=("32/8x128",), error=1e-3
):
    """Times by backend of one case at each shape, beside a bf16."""
    rows = [
        {"case": case, "shape": shape, "page_tokens": page, "codec": codec, "backend": backend}
        | {"us": us, "speed_up": None if bf16 is None else bf16 / us, "error": error}
        for shape in shapes
        for backend, us in times.items()
    ]
    return {"kind": "attention", "capability": 90, "decode": rows}


def together(*records):
    rows = [row for each in records for row in each["decode"]]
    return {"kind": "attention", "capability": 90, "decode": rows}


def taken(*records):
    """Regions by what they hold; no record's name."""
    paths = {f"{i}.json": each for i, each in enumerate(records)}
    return [replace(each, shown_by=()) for each in fastest.regions(paths, "cuda")]


def region(*, formats=(("q4_0", "q4_0"),), pages=(16,), groups=range(4, 5)):
    return Region("cuda", "decode", formats, (128,), pages, groups, ())


def test_the_fastest_is_taken_and_the_others_are_not():
    assert taken(record({"cuda": 50.0, "triton": 60.0})) == [region()]
    assert taken(record({"cuda": 60.0, "triton": 50.0})) == []
    assert taken(record({"cuda": 60.0, "triton": 70.0, "reference": 50.0})) == []
    assert taken(record({"cuda": 50.0, "triton": 50.0})) == []


def test_without_another_backend_or_a_bf16_beside_it_nothing_is_shown():
    assert taken(record({"cuda": 50.0})) == taken({"capability": 90, "decode": []}) == []
    assert taken(record({"cuda": 50.0}), record({"triton": 60.0})) == []  # of two runs
    assert taken(record({"cuda": 50.0, "triton": 60.0}, bf16=None)) == []


@pytest.mark.parametrize(
    ("small", "verdict"),
    [
        ({"cuda": 10.0, "triton": 9.2}, []),
        ({"cuda": 10.0, "triton": 9.0}, ["1.11 times the time of another at 1x2k"]),
        ({"cuda": 21.0, "triton": 20.0}, ["slower than bf16 at 1x2k, 0.95"]),
        ({"cuda": 22.0, "triton": 21.0}, []),  # no other is as fast as bf16
    ],
)
def test_a_case_may_be_lost_by_little_but_not_to_bf16(small, verdict):
    both = together(record({"cuda": 50.0, "triton": 80.0}), record(small, bf16=20.0, case="1x2k"))
    (cases,) = fastest.judged([both], "cuda").values()
    assert fastest.wrongs(cases) == verdict
    assert bool(taken(both)) == (not verdict)
    # the same in a run of its own
    split = [record({"cuda": 50.0, "triton": 80.0}), record(small, bf16=20.0, case="1x2k")]
    assert taken(*split) == taken(both)


def test_formats_that_are_not_packed_may_lose_a_case_by_little():
    """Beside the other backend they are the bf16 that is the fastest, or as slow."""
    cases = [({"cuda": 50.0, "triton": 80.0}, 50.0), ({"cuda": 21.0, "triton": 20.0}, 20.0)]
    for codec, verdict in (("bf16", True), ("fp16", True), ("q8_0", False)):
        records = [
            record(times, bf16=best, case=f"{i}x2k", codec=codec)
            for i, (times, best) in enumerate(cases, 1)
        ]
        assert bool(taken(*records)) == verdict, codec


@pytest.mark.parametrize("error", [None, 1.0])
def test_what_is_wrong_is_not_taken_however_fast(error):
    both = together(
        record({"cuda": 50.0, "triton": 80.0}),
        record({"cuda": 1.0, "triton": 80.0}, case="1x2k", error=error),
    )
    assert taken(both) == []
    assert fastest.wrongs(fastest.judged([both], "cuda").popitem()[1]) == ["wrong at 1x2k"]


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (['{"kind": "attention", "dec'], "0.json cannot be read: "),
        ([None], "0.json cannot be read: "),
        (["{}"], "0.json is no record of `kvq bench attention`"),
        (["[]"], "0.json is no record of `kvq bench attention`"),
        (['{"kind": "attention", "capability": 90, "failed": ["q4_0"]}'], "lacks measurements"),
        (['{"kind": "attention"}'], "does not say the GPU's compute capability"),
        (
            ['{"kind": "attention", "capability": 80}', '{"kind": "attention", "capability": 90}'],
            "of compute capabilities {80, 90}",
        ),
    ],
)
def test_what_shows_nothing_is_refused(texts, said, tmp_path, monkeypatch, capsys):
    paths = [tmp_path / f"{i}.json" for i in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        if text is not None:
            path.write_text(text)
    monkeypatch.setattr(sys, "argv", ["fastest", *map(str, paths)])
    assert fastest.main() == 2
    told = capsys.readouterr()
    assert said in told.err and told.err.count("\n") == 1 and not told.out


def test_the_mean_over_the_cases_decides():
    many = [record({"cuda": 10.0, "triton": 9.5}, case=f"{n}x4k") for n in (1, 2, 3)]
    cases = fastest.judged([*many, record({"cuda": 10.0, "triton": 10.5})], "cuda")
    assert fastest.wrongs(next(iter(cases.values()))) == ["0.97 times as fast in the mean"]


def test_what_lies_between_measured_neighbours_is_taken_too():
    won, lost = {"cuda": 50.0, "triton": 60.0}, {"cuda": 60.0, "triton": 50.0}
    one, four, eight = "8/8x128", "32/8x128", "64/8x128"
    assert taken(record(won, shapes=(one, four, eight))) == [region(groups=range(1, 9))]
    split = together(record(won, shapes=(one, eight)), record(lost, shapes=(four,)))
    assert taken(split) == [region(groups=range(1, 2)), region(groups=range(8, 9))]
    end = together(record(lost, shapes=(one,)), record(won, shapes=(four, eight)))
    assert taken(end) == [region(groups=range(4, 9))]
    pages = together(record(won), record(won, page=64))
    assert taken(pages) == [region(pages=(16, 32, 64))]
    gap = together(record(won), record(lost, page=32), record(won, page=64))
    assert taken(gap) == [region(pages=(16, 64))]
    other = together(record(won, shapes=(one, four)), record(won, page=64))
    assert taken(other) == [region(groups=range(1, 5)), region(pages=(32, 64))]


def test_a_page_size_between_two_has_the_groups_that_both_are_taken_with():
    won, lost = {"cuda": 50.0, "triton": 60.0}, {"cuda": 60.0, "triton": 50.0}
    one, two, four, eight = "8/8x128", "16/8x128", "32/8x128", "64/8x128"
    crossed = together(
        record(won, shapes=(one, four)),
        record(won, page=64, shapes=(two, eight)),
    )
    assert taken(crossed) == [
        region(pages=(16,), groups=range(1, 5)),
        region(pages=(32,), groups=range(2, 5)),
        region(pages=(64,), groups=range(2, 9)),
    ]
    apart = together(record(won, shapes=(one,)), record(won, page=64, shapes=(four,)))
    assert taken(apart) == [region(groups=range(1, 2)), region(pages=(64,))]
    # what was measured at 32 is all that is said of 32
    tried = together(record(won, shapes=(one, four)), record(won, page=64, shapes=(one, four)))
    assert taken(tried) == [region(pages=(16, 32, 64), groups=range(1, 5))]
    told = together(tried, record(lost, page=32, shapes=(one,)))
    assert taken(told) == [region(pages=(16, 64), groups=range(1, 5))]
    beyond = together(record(won, page=32), record(won, page=64))
    assert taken(beyond) == [region(pages=(32, 64))]


def test_formats_taken_alike_share_a_region():
    won = {"cuda": 50.0, "triton": 60.0}
    both = together(record(won), record(won, codec="k=q8_0,v=q4_0"))
    assert taken(both) == [region(formats=(("q4_0", "q4_0"), ("q8_0", "q4_0")))]


def test_it_prints_what_it_found_and_regions_to_be_copied(tmp_path, monkeypatch, capsys):
    path = tmp_path / "record.json"
    won, lost = {"cuda": 50.0, "triton": 60.0}, {"cuda": 60.0, "triton": 50.0}
    path.write_text(json.dumps(together(record(won), record(lost, codec="fp8"))))
    monkeypatch.setattr(sys, "argv", ["fastest", str(path)])
    assert fastest.main() == 0
    first, second, level, printed = capsys.readouterr().out.splitlines()
    assert level == "compute capability 90:"
    assert first == (
        "fp8, head_dim 128, page 16, group 4: 0.83 times as fast in the mean, 0.83 at 8x4k "
        "(1 cases); not taken: 0.83 times as fast in the mean; 1.20 times the time of another at "
        "8x4k"
    )
    assert second.endswith("1.20 times as fast in the mean, 1.20 at 8x4k (1 cases); taken")
    assert eval(printed) == replace(region(), shown_by=(str(path),))
    assert str(Kind("q8_0", "q4_0", 64, 32, 1)).startswith("k=q8_0,v=q4_0, head_dim 64, page 32")


def test_a_record_of_one_backend_shows_nothing(tmp_path, monkeypatch, capsys):
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record({"triton": 60.0})))
    monkeypatch.setattr(sys, "argv", ["fastest", str(path)])
    assert fastest.main() == 0
    assert capsys.readouterr().out == "cuda was not measured beside another backend\n"
