"""Timelines: what is drawn, where, in which colour."""

import re

import pytest

from pd2bw_fx.actions import Kind
from pd2bw_fx.report import svg
from pd2bw_fx.report.timeline import timeline_svg
from pd2bw_fx.timeline import Timeline
from tests.drawn import SVG, boxes, texts, two_ranks


def test_a_timeline_has_a_box_for_each_forward_backward_and_update() -> None:
    picture = timeline_svg(two_ranks())

    assert len(boxes(picture, r"pd-f\d")) == 8
    assert len(boxes(picture, r"pd-b\d")) == 8
    assert len(boxes(picture, r"pd-update")) == 8
    assert "rank 0" in texts(picture)
    assert "rank 1" in texts(picture)


def test_boxes_stand_and_stretch_in_proportion_to_time() -> None:
    timeline = two_ranks()

    forwards = boxes(timeline_svg(timeline), r"pd-f\d")
    backwards = boxes(timeline_svg(timeline), r"pd-b\d")

    starts = [float(box.get("x", "nan")) for box in forwards]
    expected = [event.start_s for event in timeline.events if event.kind is Kind.FORWARD]
    pixels_per_s = (starts[3] - starts[0]) / (expected[3] - expected[0])
    assert starts == pytest.approx([starts[0] + (s - expected[0]) * pixels_per_s for s in expected], abs=0.02)
    # Between neighbours 0.8 pixels are left bare.
    assert [float(b.get("width", "nan")) for b in backwards] == pytest.approx(
        [2 * pixels_per_s - 0.8] * 8, abs=0.02
    )
    assert [float(b.get("width", "nan")) for b in forwards] == pytest.approx(
        [pixels_per_s - 0.8] * 8, abs=0.02
    )


def test_ranks_are_rows_that_do_not_touch() -> None:
    rows = sorted({(float(b.get("y", "nan")), float(b.get("height", "nan")))
                   for b in boxes(timeline_svg(two_ranks()), r"pd-[fb]\d")})  # fmt: skip

    (first_top, first_height), (second_top, _) = rows
    assert first_top + first_height < second_top


def test_microbatches_on_the_same_weights_have_the_same_colour_and_the_next_version_another() -> None:
    colours = [box.get("class") for box in boxes(timeline_svg(two_ranks()), r"pd-b\d")][:4]

    assert colours == ["pd-b0", "pd-b0", "pd-b1", "pd-b2"]
    for index in range(3):
        assert f".pd-b{index}{{fill:{svg.HUES[index]}}}" in timeline_svg(two_ranks())


def test_the_colours_follow_the_readers_scheme_and_text_is_readable_in_both() -> None:
    picture = timeline_svg(two_ranks())
    light, dark = picture.split("@media (prefers-color-scheme:dark)")

    def contrast(a: str, b: str) -> float:
        lighter, darker = sorted((luminance(a), luminance(b)), reverse=True)
        return (lighter + 0.05) / (darker + 0.05)

    def luminance(colour: str) -> float:
        shares = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [s / 12.92 if s <= 0.03928 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for rules in (light, dark):
        fills = dict(re.findall(r"\.pd-(\w+)\{fill:(#\w{6})\}", rules))
        assert contrast(fills["ink"], fills["surface"]) > 7
        assert contrast(fills["muted"], fills["surface"]) > 4.5
        for name in ("f0", "b0", "f3", "b3", "f4", "b4"):
            assert contrast(fills[f"{name}t"], fills[name]) > 4, name


def test_a_long_timeline_shows_its_beginning_and_says_so() -> None:
    picture = timeline_svg(two_ranks(500))

    assert 130 < len(boxes(picture, r"pd-[fb]\d")) < 160
    assert any(re.search(r"of 150\d s shown", text) for text in texts(picture))


def test_a_window_shows_only_what_touches_it() -> None:
    picture = timeline_svg(two_ranks(), start_s=3.0, end_s=6.0)

    shown = [box.find(f"{SVG}title") for box in boxes(picture, r"pd-[fb]\d")]
    told = [title.text for title in shown if title is not None and title.text is not None]
    assert len(told) == 5
    assert all("microbatch 1" in text or "rank 1" in text for text in told)


def test_names_with_markup_are_escaped() -> None:
    picture = timeline_svg(two_ranks(method='<b>&"2bw"'))

    assert '<b>&"2bw" on 2 ranks, simulated' in texts(picture)


def test_an_empty_timeline_is_still_a_picture() -> None:
    assert boxes(timeline_svg(Timeline("2bw", 2, 1, ())), r"pd-[fb]\d") == []
