"""Bytes and seconds as people read them."""

from __future__ import annotations

import pytest

from pd2bw_fx.units import are, counted, format_bytes, format_seconds, parse_bytes, were


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1010 * 1024, "0.986 MiB"), (1536, "1.5 KiB"), (3 * 2**40, "3 TiB")],
)
def test_bytes_have_three_digits_and_never_a_power_of_ten(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.9999, "1 s"),
        (0.99951e-3, "1 ms"),
        (12.34e-3, "12.3 ms"),
        (2e-9, "0.002 us"),
        (6.9e-18, "0 s"),
        (4321, "4321 s"),
    ],
)
def test_seconds_have_a_unit_that_fits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_sizes_are_read_as_written() -> None:
    assert parse_bytes("1.5 GiB") == 3 * 2**29
    assert parse_bytes("16GB") == 16 * 10**9
    with pytest.raises(ValueError, match="no number of bytes"):
        parse_bytes("16 apples")


def test_one_of_a_thing_has_no_plural() -> None:
    assert counted(1, "microbatch") == "1 microbatch"
    assert [counted(0, "block"), counted(2, "microbatch")] == ["0 blocks", "2 microbatches"]
    assert [counted(2, noun) for noun in ("entry", "array", "process")] == [
        "2 entries",
        "2 arrays",
        "2 processes",
    ]
    assert [f"{are(n)} {were(n)}" for n in (0, 1, 2)] == ["are were", "is was", "are were"]
