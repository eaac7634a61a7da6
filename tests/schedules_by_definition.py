"""Schedules written from their definitions, behind which a mistake of the project's own cannot hide."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pd2bw_fx.actions import Action, Kind, Schedule


def rank_actions(text: str, stage: int, num_stages: int, version: Callable[[int], int]) -> list[Action]:
    """ "F0 F1 B0 U1" with the receives and sends of a stage in the middle of a row of stages."""
    actions = []
    for word in text.split():
        letter, number = word[0], int(word[1:])
        if letter == "U":
            actions.append(Action(Kind.UPDATE, stage, -1, number))
            continue
        forward = letter == "F"
        receive = Kind.RECEIVE_ACTIVATION if forward else Kind.RECEIVE_GRADIENT
        send = Kind.SEND_ACTIVATION if forward else Kind.SEND_GRADIENT
        has_before, has_after = stage > 0, stage < num_stages - 1
        kinds = [receive] * (has_before if forward else has_after)
        kinds += [Kind.FORWARD if forward else Kind.BACKWARD]
        kinds += [send] * (has_after if forward else has_before)
        actions += [Action(kind, stage, number, version(number)) for kind in kinds]
    return actions


def row(method: str, texts: Iterable[str], m: int, version: Callable[[int], int] = lambda k: 0) -> Schedule:
    texts = list(texts)
    ranks = tuple(tuple(rank_actions(text, s, len(texts), version)) for s, text in enumerate(texts))
    return Schedule(method, len(texts), m, range(1), ranks, drained=True, weight_versions=1)


def alternating(microbatches: range, warmup: int, m: int | None = None) -> str:
    """`warmup` forwards, then one forward and one backward in turn, then the backwards that are left."""
    words = [f"F{k}" for k in microbatches[:warmup]]
    for position, k in enumerate(microbatches):
        words += [f"F{following}" for following in microbatches[warmup + position :][:1]]
        words += [f"B{k}"]
        words += [f"U{(k + 1) // m}"] if m and (k + 1) % m == 0 else []
    return " ".join(words)


def gpipe(d: int, m: int) -> Schedule:
    text = " ".join([f"F{k}" for k in range(m)] + [f"B{k}" for k in reversed(range(m))])
    return row("gpipe", [text] * d, m)


def flush(d: int, m: int, updates: int = 1) -> Schedule:
    texts = []
    for stage in range(d):
        batches = [alternating(range(t * m, (t + 1) * m), d - 1 - stage, m) for t in range(updates)]
        texts.append(" ".join(batches))
    return row("1f1b", texts, m, lambda k: k // m)


def two_buffered(d: int, m: int, updates: int, slack: float = 0.0) -> Schedule:
    texts = []
    for stage in range(d):
        warmup = min(m - 1, round((d - 1 - stage) * (1 + slack)))
        texts.append(alternating(range(updates * m), warmup, m))
    return row("2bw", texts, m, lambda k: max(k // m - 1, 0))
