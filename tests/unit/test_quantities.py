"""Sizes, rates and times as people write them."""

from __future__ import annotations

import contextlib

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.cli import main
from ringreduce.common.quantities import parse_nbytes, parse_rate, parse_seconds

UNITS = [("", 1), ("B", 1), ("K", 1 << 10), ("M", 1 << 20), ("g", 1 << 30)]
LONGER_UNITS = [("KB", 1 << 10), ("MiB", 1 << 20), ("gb", 1 << 30), ("kib", 1 << 10)]


@given(st.integers(1, 1 << 40), st.sampled_from([*UNITS, *LONGER_UNITS]))
def test_sizes_are_read_as_written(number: int, unit: tuple[str, int]) -> None:
    """A positive whole number with an optional unit is that many 1024-based bytes."""
    assert parse_nbytes(f"{number}{unit[0]}") == number * unit[1]


@pytest.mark.parametrize("text", ["4Mb", "4Mbit", "4MBIT", "4mbit", "4Mib"])
def test_a_size_that_may_be_bits_is_refused(text: str) -> None:
    """With both meanings."""
    with pytest.raises(ValueError, match=r"may be 4MB, or 4 Mbit, which are 0\.5 MB"):
        parse_nbytes(text)


@given(st.text(max_size=6) | st.from_regex("[0-9.]{1,4} ?[KMGTkmgtK]i?[bB](it|yte)?s?(ps|PS|/s)?", fullmatch=True))
def test_any_text_is_a_quantity_or_a_value_error(text: str) -> None:
    """No text ends in another error than ValueError, and none gives a size below one byte or no rate."""
    with contextlib.suppress(ValueError):
        assert parse_nbytes(text) >= 1
    for of_link in (True, False):
        with contextlib.suppress(ValueError):
            assert parse_rate(text, of_link=of_link) > 0
    with contextlib.suppress(ValueError):
        assert parse_seconds(text) >= 0


BITS = ["100Gbit/s", "100Gb", "100Gbps", "100Gb/s", "100gbps", "100gbit/s", "100gbit", "100 GBIT/s", "100Gbits/sec"]
BYTES = ["100GB", "100GB/s", "100GBps", "100gB/s", "100 Gbyte/s", "100gbytes", "100 GB/sec"]


def test_rates_are_bits_or_bytes_by_the_case_of_b():
    """A lone b is bits, B is bytes, and words are what they say; the letters before are powers of 1000 or 1024."""
    for text in [*BITS, "100G", "100gb", "100g", "100gb/s"]:
        assert parse_rate(text) == 12.5e9, text
    for text in BITS:
        assert parse_rate(text, of_link=False) == 12.5e9, text
    for text in BYTES:
        assert parse_rate(text) == parse_rate(text, of_link=False) == 100e9, text
    assert parse_rate("2GiB/s") == 2 * 1024**3
    assert parse_rate("2 Gibit/s") == 1024**3 / 4
    assert parse_rate("1.5Tb") == 1.5e12 / 8
    assert parse_rate("800 kbps") == 1e5
    assert parse_rate("8000b/s") == 1000.0


@pytest.mark.parametrize(("text", "of_link"), [("8G", False), ("8gb", False), ("8GBPS", True), ("8GBPS", False)])
def test_an_ambiguous_rate_is_refused(text: str, of_link: bool) -> None:
    """With both meanings, so that one can be chosen: of memory, where neither case nor words tell; in capitals."""
    with pytest.raises(ValueError, match=r"ambiguous: write 8Gbit/s \(1 GB/s\), or 8GB/s \(64 Gbit/s\)"):
        parse_rate(text, of_link=of_link)


@pytest.mark.parametrize("text", ["100", "0G", "G", "fast", "1Gib/h", "-1G", "100ib", "1e9b", "100 G ps"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    """A number needs a unit."""
    with pytest.raises(ValueError, match="expected a rate with its unit, such as 400Gbit/s or 50GB/s"):
        parse_rate(text)


def test_times():
    """With their unit, in any case."""
    times = {
        "2us": 2e-6,
        "1.5 ms": 1.5e-3,
        "1S": 1,
        "3µs": 3e-6,
        "5ns": 5e-9,
        "0s": 0,
        "5m": 300,
        "2min": 120,
        "1.5 h": 5400,
    }
    assert {text: parse_seconds(text) for text in times} == times
    for text in ("1", "ms", "1 d", "-1s", "5 m 3", ""):
        with pytest.raises(ValueError, match="expected a time"):
            parse_seconds(text)


def test_simulate_shows_the_rate_that_it_has_understood():
    """As 100 Gbit/s, however it was written; a refusal shows both meanings."""

    def said(*options: str) -> str:
        return CliRunner().invoke(main, ["simulate", "-e", "8", *options], standalone_mode=False).output

    for text in ("100Gb", "100Gbps", "100G", "100gbit/s", "12.5GB/s"):
        assert "links 100 Gbit/s, memory 8 GB/s" in said("--link", text), text
    found = CliRunner().invoke(main, ["simulate", "--memory", "8G"], standalone_mode=False)
    assert "8Gbit/s (1 GB/s), or 8GB/s" in str(found.exception)
