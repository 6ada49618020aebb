"""Tuning tables: what a model predicts, what a table chooses and says, and what it survives."""

from __future__ import annotations

import json
import math
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from ringreduce.algorithms import Collective, names
from ringreduce.bench.tune import Sample, distinct, fit
from ringreduce.collectives import Work
from ringreduce.collectives.choice.tuning import Candidate, CostModel, Key, MeasuredSize, Table, work
from ringreduce.common.errors import ConfigError
from ringreduce.common.quantities import format_seconds
from ringreduce.common.topology import Topology
from ringreduce.transport.shared.board_memory import MAILED_NBYTES

NODE, FLAT, GRID, UNEVEN = (
    Topology.uniform(1, 4),
    Topology.uniform(4, 1),
    Topology.uniform(2, 2),
    Topology.from_hosts("aab"),
)
TOPOLOGIES = [NODE, FLAT, GRID, UNEVEN, Topology.uniform(1, 2), Topology.from_hosts("abab")]

KEY = Key(FLAT, "Some MPI 1.2", "0.1.0")
MODEL = CostModel(alpha=1e-5, beta=1e-9, sync=2e-6, copy=1e-10, gamma=2e-10, vendor_alpha=3e-5, vendor_beta=4e-9)


def table(
    *rows: dict[str, float], sizes: tuple[int, ...] = (1 << 10, 1 << 14, 1 << 18), model: CostModel = MODEL
) -> Table:
    """Return a table of medians in microseconds."""
    return Table(
        KEY,
        model,
        tuple(
            MeasuredSize(nbytes, tuple(Candidate.of_times(name, [us * 1e-6]) for name, us in row.items()))
            for nbytes, row in zip(sizes, rows, strict=False)
        ),
    )


@pytest.mark.parametrize(
    ("algorithm", "topology", "expected"),
    [
        ("ring", FLAT, Work(6, 1.5, 0, 0, 0.75, 12)),
        ("recursive_doubling", FLAT, Work(2, 2, 0, 0, 2, 4)),
        ("one_shot", FLAT, Work(1, 3, 0, 0, 3, 6)),
        ("two_shot", NODE, Work(0, 0, 2, 1.5, 0.75)),
        ("ring", NODE, Work(6, 1.5, 0, 0, 0.75, 12)),
        # Both lanes of a node share its link: each sends a half of n, in all n.
        ("hierarchical", GRID, Work(2, 1, 2, 1, 0.75, 4)),
        # Each of a node's two ranks sends all it has to the other node.
        ("recursive_doubling", GRID, Work(2, 2, 0, 0, 2, 4)),
        # Of the ring's edges, one leaves each node.
        ("ring", GRID, Work(6, 1.5, 0, 0, 0.75, 12)),
    ],
)
def test_work_follows_the_schedule(algorithm: str, topology: Topology, expected: Work):
    """Rounds, barriers and messages do not depend on the size, everything else grows with it."""
    n = 12 << 20
    rounds, sent, barriers, touched, reduced, messages = expected
    scaled = (rounds, sent * n, barriers, touched * n, reduced * n, messages)
    assert work(algorithm, n, topology) == pytest.approx(scaled)


def test_a_small_one_shot_on_a_node_is_one_barrier():
    """Up to a mailbox every rank reads the others' at once; beyond, messages carry the data."""
    assert work("one_shot", MAILED_NBYTES, NODE) == (0, 0, 1, 3 * MAILED_NBYTES, 3 * MAILED_NBYTES, 0)
    assert work("one_shot", MAILED_NBYTES + 1, NODE)[:3] == (1, 3 * (MAILED_NBYTES + 1), 0)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=Topology.describe)
def test_every_algorithm_has_a_prediction(topology: Topology):
    """Whatever can run takes time, and more bytes take no less."""
    for name in (*names(Collective.ALLREDUCE, topology), "mpi"):
        times = [MODEL.predict(name, nbytes, topology) for nbytes in (0, 8, 1 << 20, 1 << 30)]
        assert 0 < times[0] <= times[1] < times[2] < times[3]


def test_model_adds_its_terms():
    """Ring on 4 ranks: 6 alpha + 1.5 n beta + 0.75 n gamma + 12 messages; the library's own is a straight line."""
    costly = replace(MODEL, message=1e-6)
    assert costly.predict("ring", 1000, FLAT) == pytest.approx(7.2e-5 + 1500e-9 + 750 * 2e-10)
    assert MODEL.predict("ring", 1000, FLAT) == pytest.approx(6e-5 + 1500e-9 + 750 * 2e-10)
    assert MODEL.predict("mpi", 1000, FLAT) == pytest.approx(3e-5 + 4e-6)


@pytest.mark.parametrize("name", ["mpi", "rnig"])
def test_what_the_model_does_not_know_is_refused(name: str):
    """A library that was not measured has no prediction, an algorithm that does not exist neither."""
    with pytest.raises(ConfigError, match=f"unknown allreduce algorithm '{name}'"):
        replace(MODEL, vendor_alpha=0.0, vendor_beta=0.0).predict(name, 8, FLAT)


def test_fit_recovers_the_parameters():
    """From times that a model made, the same model comes back."""
    truth = replace(MODEL, message=7e-7)
    sizes = (8, 1 << 13, 1 << 20)
    samples = [
        Sample(name, nbytes, topology, truth.predict(name, nbytes, topology))
        for topology in (FLAT, GRID, UNEVEN)
        for name in (*names(Collective.ALLREDUCE, topology), "mpi")
        for nbytes in sizes
    ]
    found = fit(samples)
    for name in ("alpha", "beta", "sync", "copy", "gamma", "message", "vendor_alpha", "vendor_beta"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-6), name


def test_fit_is_never_negative():
    """Where a straight fit would make a parameter negative, it is 0, and the others do their best."""
    times = {8: 9e-6, 1 << 10: 6e-6, 1 << 20: 5e-6}  # faster with size, which nothing explains
    found = fit([Sample("ring", nbytes, FLAT, seconds) for nbytes, seconds in times.items()])
    assert (found.beta, found.gamma, found.sync, found.copy) == (0, 0, 0, 0)
    # The least sum of squares of (6 alpha / t - 1).
    inverse = [1 / seconds for seconds in times.values()]
    assert 6 * found.alpha == pytest.approx(sum(inverse) / sum(each**2 for each in inverse))


def test_a_slow_network_is_not_taken_for_a_slow_processor():
    """Where times would be explained best by slow reductions, they are held to be sends."""
    sizes, slow = (8, 1 << 13, 1 << 20), replace(MODEL, gamma=1e-8)
    algorithms = ("ring", "recursive_doubling", "one_shot", "direct")
    found = fit(
        [Sample(name, nbytes, FLAT, slow.predict(name, nbytes, FLAT)) for name in algorithms for nbytes in sizes]
    )
    assert found.gamma == 1e-9
    assert found.beta > 4 * MODEL.beta
    for name in algorithms:
        assert found.predict(name, 1 << 20, FLAT) == pytest.approx(slow.predict(name, 1 << 20, FLAT), rel=0.35)


def test_fit_of_nothing_is_nothing():
    """Parameters of which the samples say nothing are 0."""
    assert fit([]) == CostModel(0, 0, 0, 0, 0)
    found = fit([Sample("two_shot", 8, NODE, 1e-6), Sample("two_shot", 1 << 20, NODE, 1e-4)])
    assert (found.alpha, found.beta) == (0, 0)
    assert found.sync > 0


def test_the_same_under_two_names_is_measured_once():
    """On one node the hierarchical algorithms are the two-shot, with one rank on each they are those between nodes."""
    hierarchical = [f"hierarchical{suffix}" for suffix in ("", "_doubling", "_halving", "_direct")]
    for topology, same in ((NODE, hierarchical), (FLAT, hierarchical), (Topology.uniform(4, 2), [])):
        listed = list(names(Collective.ALLREDUCE, topology))
        assert [name for name in listed if name not in distinct(listed, topology)] == same


def test_choose_at_a_measured_size():
    """The fastest there, and the next."""
    found = table({"ring": 30, "direct": 20, "mpi": 25})
    assert found.choose(1 << 10) == ("direct", pytest.approx(20e-6), "mpi", pytest.approx(25e-6))


def test_choose_between_sizes():
    """Times are interpolated in logarithms: half way between 10 and 40 us is 20 us."""
    found = table({"ring": 10, "direct": 90}, {"ring": 40, "direct": 10})
    assert found.choose(1 << 12) == ("ring", pytest.approx(20e-6), "direct", pytest.approx(30e-6))
    assert found.choose(1 << 13).algorithm == "direct"  # 10 * 4 ** 0.75 = 28.3 us and 90 / 9 ** 0.75 = 17.3 us


def test_choose_knows_only_what_both_neighbours_know():
    """An algorithm measured at one of the sizes alone is not guessed at."""
    found = table({"one_shot": 5, "ring": 10, "mpi": 12}, {"direct": 20, "ring": 40, "mpi": 30})
    assert found.choose(1 << 11)[::2] == ("ring", "mpi")


def test_choose_knows_where_an_algorithm_changes():
    """Just above a mailbox the one-shot is no longer what was measured just below."""
    rows = ({"one_shot": 30, "two_shot": 40}, {"one_shot": 35, "two_shot": 41})
    found = replace(table(*rows, sizes=(MAILED_NBYTES, 4 * MAILED_NBYTES)), key=replace(KEY, topology=NODE))
    assert found.choose(MAILED_NBYTES).algorithm == "one_shot"
    assert found.choose(MAILED_NBYTES + 4)[::2] == ("two_shot", None)
    assert replace(found, key=KEY).choose(MAILED_NBYTES + 4).algorithm == "one_shot"  # messages at all sizes


def test_choose_where_neighbours_have_nothing_in_common():
    """Then the nearer size counts, carried over by the model."""
    found = table({"ring": 100}, {"direct": 100})
    near = MODEL.predict("ring", 1 << 11, FLAT) / MODEL.predict("ring", 1 << 10, FLAT)
    assert found.choose(1 << 11) == ("ring", pytest.approx(100e-6 * near), None, math.inf)
    assert found.choose(1 << 13).algorithm == "direct"


def test_choose_beyond_the_sizes():
    """The nearest size's times are scaled by the model, so the order may change."""
    # 6 rounds of 10 us and 1.65 ns per byte, against 2 rounds and 2.4 ns per byte: ring wins in the long run.
    found = table({"ring": 60, "recursive_doubling": 20})
    assert found.choose(0)[::2] == ("recursive_doubling", "ring")
    assert found.choose(1 << 10)[::2] == ("recursive_doubling", "ring")
    large = found.choose(1 << 30)
    assert large[::2] == ("ring", "recursive_doubling")
    ratio = MODEL.predict("ring", 1 << 30, FLAT) / MODEL.predict("ring", 1 << 10, FLAT)
    assert large.seconds == pytest.approx(60e-6 * ratio)


def test_choose_below_the_sizes():
    """Smaller than anything measured, nothing at all included, is like the smallest."""
    found = table({"ring": 60, "direct": 20})
    assert {found.choose(nbytes).algorithm for nbytes in (0, 1, 4, 1023)} == {"direct"}


def test_choose_with_a_model_that_knows_nothing():
    """A model of zeros leaves the times as they are."""
    found = table({"ring": 60, "direct": 20}, model=CostModel(0, 0, 0, 0, 0))
    assert found.choose(1 << 30)[:2] == ("direct", pytest.approx(20e-6))


@pytest.mark.parametrize(("ring", "taken"), [(104, "ring"), (106, "direct")])
def test_small_differences_do_not_change_the_choice(ring: float, taken: str):
    """What runs at the next smaller size stays unless something is more than 5 % faster; both are told."""
    found = table({"ring": 10, "direct": 20}, {"ring": ring, "direct": 100}, {"ring": 500, "direct": 400})
    assert found.choose(1 << 14).algorithm == taken
    assert found.choose(1 << 14).second == ({"ring", "direct"} - {taken}).pop()
    assert found.choose(1 << 18).algorithm == "direct"


def test_the_choice_does_not_flap():
    """Two that are equal but for noise: one of them at all sizes, measured or not."""
    rows = [{"ring": 100 + noise, "direct": 100 - noise} for noise in (1, -1, 2, -2, 1, -1)]
    found = table(*rows, sizes=tuple(1 << exponent for exponent in range(10, 16)))
    assert {found.choose(nbytes).algorithm for nbytes in range(1 << 10, 1 << 15, 77)} == {"direct"}


def test_between_sizes_the_larger_ones_winner_is_next():
    """Where the smaller size's winner is beaten, that of the larger size stays if it is close to the fastest."""
    found = table({"ring": 10, "direct": 30, "mpi": 29.6}, {"ring": 90, "direct": 10, "mpi": 10.1})
    assert found.choose(1 << 13).algorithm == "direct"
    found = table({"ring": 10, "direct": 30, "mpi": 29.6}, {"ring": 90, "direct": 10.1, "mpi": 10})
    assert found.choose(1 << 13).algorithm == "mpi"


def test_explain_is_one_line():
    """Where the figures of what runs come from, and what would be second."""
    found = table({"ring": 20, "direct": 90}, {"ring": 80, "direct": 100})
    model = format_seconds(MODEL.predict("ring", 1 << 10, FLAT))
    assert found.explain(1 << 10) == f"measured 20 us, model {model}; second direct 90 us (+350 %)"
    assert found.explain(1 << 12).startswith("interpolated between 1024 and 16384 bytes 40 us, model ")
    assert found.explain(1 << 20).startswith("scaled by the model from 16384 bytes 1.")
    assert table({"ring": 20}).explain(1 << 10).endswith("; nothing else was measured")


@pytest.mark.parametrize(
    ("seconds", "text"), [(9.87654e-7, "0.9877 us"), (12.34e-6, "12.34 us"), (1e-3, "1 ms"), (2.5, "2.5 s")]
)
def test_times_are_written_shortly(seconds: float, text: str):
    """Four digits, in the unit that fits."""
    assert format_seconds(seconds) == text


def test_candidates_have_the_median_of_their_times():
    """To the nanosecond."""
    assert Candidate.of_times("ring", [3e-6, 1e-6, 2.0000001e-6]) == Candidate("ring", 2e-6, (3e-6, 1e-6, 2e-6))


def test_key_is_text_and_a_stable_name():
    """The text says everything, the file name is made of its hash and never changes."""
    assert KEY.text == "ranks 0/1/2/3; Some MPI 1.2; ringreduce 0.1.0; cpu"
    assert replace(KEY, topology=Topology.from_hosts("abab")).text.startswith("ranks 0 2/1 3; ")
    assert KEY.digest == "961e820ade06a32ba12a3cd1b3999d0150100d8279b48876fbda65b1236b6992"
    assert KEY.file_name == f"allreduce-{KEY.digest}.json"


@pytest.mark.parametrize(
    "change", [{"topology": GRID}, {"library": "Some MPI 1.3"}, {"version": "0.2.0"}, {"device": "cuda"}]
)
def test_another_machine_is_another_key(change: dict[str, object]):
    """Whatever may change the times changes the name of the file."""
    assert replace(KEY, **change).digest != KEY.digest


FULL = replace(table({"ring": 10, "mpi": 30.123}, {"ring": 1 / 3, "direct": 1e7}), busy_cores=0.37)


def test_files_keep_everything(tmp_path: Path):
    """To the last bit; folders are made, an older file gives way, and nothing else is left behind."""
    path = tmp_path / "a" / "b" / KEY.file_name
    table({"ring": 10}).save(path)
    FULL.save(path)
    assert Table.load(path, KEY) == FULL
    assert list(path.parent.iterdir()) == [path]


def test_a_table_that_cannot_be_written_says_so(tmp_path: Path):
    """The path in the way is named, and no part of a file stays."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written: .*file"):
        FULL.save(tmp_path / "file" / "table.json")
    (tmp_path / "table.json").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        FULL.save(tmp_path / "table.json")
    assert {each.name for each in tmp_path.iterdir()} == {"file", "table.json"}


def test_a_table_of_another_machine_is_refused(tmp_path: Path):
    """Both machines are named."""
    path = tmp_path / "table.json"
    FULL.save(path)
    with pytest.raises(ConfigError, match=r"table.json: a .* for \[ranks 0/1/2/3; .* this is \[ranks 0 1/2 3"):
        Table.load(path, replace(KEY, topology=GRID))


def damaged(**changes: object) -> str:
    """Return the JSON of a table in which some entries, by their path, have another value."""
    document = json.loads(FULL.to_json())
    for place, value in changes.items():
        *path, last = (int(part) if part.isdigit() else part for part in place.split("__"))
        part = document
        for each in path:
            part = part[each]
        if value is None:
            del part[last]
        else:
            part[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not JSON"),
        (FULL.to_json()[:-20], "not JSON"),
        ("[1, 2]", "no format version"),
        ("{}", "no format version"),
        (damaged(format=1), "format 1, where 2 is understood"),
        (damaged(key=None), "KeyError: 'key'"),
        (damaged(key__library=None), "library"),
        (damaged(key__library=7), "library is 7"),
        (damaged(key__topology=[[0, 1], [3]]), "nodes"),
        (damaged(key__topology=3), "TypeError"),
        (damaged(model__alpha=-1), "-1 is not a time"),
        (damaged(model__alpha="fast"), "fast"),
        (damaged(model__alpha=math.nan), "nan is not a time"),
        (damaged(model__delta=1), "delta"),
        (damaged(busy_cores=None), "busy_cores"),
        (damaged(busy_cores=-1), "-1 is no number of cores"),
        (damaged(busy_cores=math.nan), "nan is no number of cores"),
        (damaged(model=[1]), "AttributeError"),
        (damaged(rows=[]), "the sizes are"),
        (damaged(rows__1__nbytes=1 << 10), "the sizes are"),
        (damaged(rows__0__nbytes=-4), "the sizes are"),
        (damaged(rows__0__nbytes=math.inf), "OverflowError"),
        (damaged(rows__0__candidates=[]), "no algorithm, or one twice, at 1024 bytes"),
        (damaged(rows__0__candidates__0__algorithm="mpi"), "no algorithm, or one twice, at 1024 bytes"),
        (damaged(rows__0__candidates__0__algorithm=3), "3 takes"),
        (damaged(rows__0__candidates__0__median_s=0), "takes 0.0 s"),
        (damaged(rows__0__candidates__0__times_s=None), "times_s"),
        (damaged(rows__0__candidates__0__times_s=["x"]), "x"),
        (damaged(rows__0__candidates__0__algorithm="two_shot"), "algorithm 'two_shot' cannot run there"),
        (damaged(key__topology=[]), "nodes ()"),
        (damaged(model__vendor_alpha=0, model__vendor_beta=0), "nothing is known about algorithm 'mpi'"),
    ],
)
def test_a_damaged_file_is_refused(text: str, complaint: str, tmp_path: Path):
    """The error names the file and what is wrong with it; nothing of it is used."""
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Table.load(path, KEY)
    assert str(caught.value).startswith(f"{path}: ")
    assert complaint in str(caught.value)


HUGE = "7" * 4000

OVERDONE = {
    "nested": "[" * 100_000,
    "nested objects": '{"format": ' * 100_000,
    "nested format": '{"format": ' + "[" * 900 + "]" * 900 + "}",
    "a long format": damaged(format="x" * 1_000_000),
    "a huge format": FULL.to_json().replace('"format": ', '"format": ' + HUGE),
    "a huge size": FULL.to_json().replace('"nbytes": 1024', '"nbytes": ' + HUGE),
    "a huge size as a float": FULL.to_json().replace('"nbytes": 16384', '"nbytes": 1e300'),
    "a size beyond all memory": FULL.to_json().replace('"nbytes": 16384', f'"nbytes": {1 << 63}'),
    "a huge size as a text": damaged(rows__1__nbytes=HUGE),
    "a huge rank": FULL.to_json().replace('"topology": [[0]', f'"topology": [[{HUGE}]'),
    "a huge rank as a text": damaged(key__topology=[[HUGE]]),
    "a huge time": FULL.to_json().replace('"median_s": ', '"median_s": ' + HUGE),
    "a time of an age": damaged(rows__0__candidates__0__median_s=1e300),
    "more digits than Python reads": FULL.to_json().replace('"nbytes": 1024', '"nbytes": ' + 100 * HUGE),
    "no number": FULL.to_json().replace('"nbytes": 1024', '"nbytes": NaN'),
    "no finite number": FULL.to_json().replace('"nbytes": 1024', '"nbytes": -Infinity'),
    "no finite rank": FULL.to_json().replace('"topology": [[0]', '"topology": [[Infinity]'),
    "a long word for a time": damaged(model__alpha="x" * 1_000_000),
    "a long name of a parameter": damaged(**{"model__" + "x" * 1_000_000: 1.0}),
    "many lines": damaged(key__library="Some MPI\n\x1b[31m1.2\r\n" * 1000),
}


@pytest.mark.parametrize("text", OVERDONE.values(), ids=OVERDONE)
def test_what_is_overdone_is_refused_in_a_line(text: str, tmp_path: Path):
    """Nesting, digits and texts without end make an error of one short line that names the file."""
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Table.load(path, KEY)
    said = str(caught.value)
    assert said.startswith(f"{path}: ")
    assert said.isprintable()
    assert len(said) < len(str(path)) + 600


def test_only_plain_files_are_read(tmp_path: Path):
    """A pipe that nobody writes to, a folder, a device without end and a file of a terabyte are refused at once."""
    path = tmp_path / "table.json"
    path.mkdir()
    with pytest.raises(ConfigError, match="Is a directory"):
        Table.load(path, KEY)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="no regular file"):
        Table.load(path, KEY)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="no regular file"):
        Table.load(path, KEY)
    path.unlink()
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(ConfigError, match="more than 4 MiB"):
        Table.load(path, KEY)


def test_a_link_to_a_table_is_followed(tmp_path: Path):
    """Whoever keeps tables in one place may refer to them from another."""
    FULL.save(tmp_path / "kept.json")
    (tmp_path / "table.json").symlink_to("kept.json")
    assert Table.load(tmp_path / "table.json", KEY) == FULL


def test_tables_are_private(tmp_path: Path):
    """Nobody else may write a table of this user's, or put one into the folder that was made for them."""
    path = tmp_path / "new" / "table.json"
    before = os.umask(0)
    try:
        FULL.save(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_missing_or_binary_file_is_refused(tmp_path: Path):
    """As any other that cannot be read."""
    with pytest.raises(ConfigError, match="No such file"):
        Table.load(tmp_path / "none.json", KEY)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="utf-8"):
        Table.load(tmp_path / "binary.json", KEY)
