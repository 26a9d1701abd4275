"""An explanation as a person reads it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import zip_longest

import torch

from microddp.cli.explain import Explanation
from microddp.cli.explain_bytes import ranks_text, write_bytes
from microddp.cli.formulas import ALIGNMENT_NBYTES, num_steps_formula
from microddp.cli.output import Column, Output, counted
from microddp.cli.playback import OPERATOR_SIGNS, Picture
from microddp.cli.tensors import element_texts
from microddp.schedule import Step
from microddp.schedule.render import step_text

__all__ = ["write_text"]

_SHOWN_ELEMENTS = 8
_SHOWN_WORDS = 10
_SHOWN_SLOTS = 3
_SHOWN_ORDERS = 4
_MOVES_WIDTH = (22, 46)  # at least, at most
_LONG_ORDER = 60


def write_text(explanation: Explanation, out: Output, *, full: bool) -> None:
    """Writes all sections."""
    full = full or len(explanation.ranks) == explanation.schedule.world_size
    _write_title(explanation, out)
    _write_timetable(explanation, out, full)
    _write_proof(explanation, out)
    _write_steps(explanation, out, full)
    write_bytes(explanation, out)


def _write_title(explanation: Explanation, out: Output) -> None:
    schedule, op = explanation.schedule, explanation.op
    name = f"{schedule.algorithm}{', in rank order' if explanation.order else ''}"
    n = schedule.world_size
    kind = "" if schedule.algorithm == schedule.collective else f": {schedule.collective}"
    out.line(f"{name}{kind} over {counted(n, 'rank')}", "bold")
    summary = (schedule.entry.steps.__doc__ or "").strip().partition("\n")[0]
    if summary:
        out.paragraph(summary)
    size = f"S = {explanation.nbytes} bytes: {counted(explanation.numel, 'element')} of {explanation.dtype}"
    root = f", root {schedule.root}" if schedule.entry.rooted else ""
    out.line(f"n = {n}, {size}{f', {op.name}' if op else ''}{root}")


def _write_timetable(explanation: Explanation, out: Output, full: bool) -> None:
    schedule = explanation.schedule
    out.heading("Timetable")
    note = "c0->1 sends chunk 0 to rank 1, c0<-2 receives it from rank 2, fold combines what arrived"
    text = schedule.render() if len(explanation.ranks) == schedule.world_size else ""
    if ".k" in text:
        note += ", k2 is the value of rank 2 in a slot"
    out.paragraph(f"{note}.", "dim")
    lines = text.splitlines()[1:]
    if lines and len(explanation.steps) > explanation.proof.num_steps and max(map(len, lines)) <= out.width:
        for line in lines:
            out.line(line)
        return
    for number, (ranks, rows) in enumerate(_timetable_parts(explanation, out.width, full)):
        if number:
            out.line()
        out.table([Column("step"), *(Column(f"rank {rank}") for rank in ranks)], rows)
    _write_left_out(explanation, out)


def _timetable_parts(explanation: Explanation, width: int, full: bool) -> list[tuple[list[int], list[list[str]]]]:
    """The timetable in parts that fit the width: the ranks of each, and its rows."""
    schedule, shown = explanation.schedule, [step for step in explanation.steps if step >= 0]
    columns = zip_longest(*(schedule.steps(rank) for rank in explanation.ranks), fillvalue=Step())
    texts = [
        [" ".join(_elided(step_text(step).split(" "), full)) for step in steps]
        for number, steps in enumerate(columns)
        if number in set(shown)
    ]
    widths = [max([len(f"rank {rank}"), *map(len, column)]) for rank, column in zip(explanation.ranks, zip(*texts))]
    parts: list[tuple[list[int], list[list[str]]]] = []
    start = 0
    while start < len(widths):
        stop, used = start + 1, 4 + 2 + widths[start]
        while stop < len(widths) and used + 2 + widths[stop] <= width:
            used += 2 + widths[stop]
            stop += 1
        rows = [[str(step), *cells[start:stop]] for step, cells in zip(shown, texts)]
        parts.append((explanation.ranks[start:stop], rows))
        start = stop
    return parts


def _write_left_out(explanation: Explanation, out: Output) -> None:
    ranks = sorted(set(range(explanation.schedule.world_size)) - set(explanation.ranks))
    steps = sorted(set(range(explanation.proof.num_steps)) - set(explanation.steps))
    parts = [f"{name} {ranks_text(numbers)}" for name, numbers in (("ranks", ranks), ("steps", steps)) if numbers]
    if parts:
        out.paragraph(f"Left out: {' and '.join(parts)}; --full shows all.", "dim")


def _write_proof(explanation: Explanation, out: Output) -> None:
    proof, schedule = explanation.proof, explanation.schedule
    out.heading("Proved, on symbols")
    known = num_steps_formula(schedule.algorithm, schedule.world_size)
    steps = f"{proof.num_steps}" if known is None else f"{known}, {'OK' if explanation.steps_are_right else 'MISMATCH'}"
    held = "each contribution exactly once" if explanation.op else "every value arrives where it belongs"
    rows = [
        ["correct", f"{held}, all transfers matched, no deadlock"],
        ["steps", f"{steps if known is None else f'{proof.num_steps} | {steps}'}"],
        ["messages", str(proof.num_messages)],
        ["same bits", _same_bits_text(explanation)],
    ]
    if explanation.op:
        rows.append(["rank order", "yes" if proof.rank_order else "no"])
        rows += [["order" if not number else "", text] for number, text in enumerate(_order_texts(explanation))]
    width = max(20, min(out.width, 100) - 12)
    out.pairs(rows, width)


def _same_bits_text(explanation: Explanation) -> str:
    if explanation.schedule.collective in ("reduce_scatter", "reduce"):
        return "each result is on one rank only"
    if explanation.proof.same_bits:
        return "yes, every rank ends with the same order of combination" if explanation.op else "yes"
    return "no: the ranks combine in different orders, so floats may differ in their last bits"


def _order_texts(explanation: Explanation) -> list[str]:
    """How some results were combined, as text."""
    proof, op = explanation.proof, explanation.op
    sign = OPERATOR_SIGNS.get(op.name, "∘") if op else "∘"
    by_text: dict[tuple[int, str], list[int]] = {}
    for rank, chunk in proof.places():
        by_text.setdefault((chunk, proof.order(chunk, rank).replace("∘", sign)), []).append(rank)
    several = explanation.schedule.num_chunks > 1
    lines = []
    for (chunk, text), ranks in sorted(by_text.items(), key=lambda item: (item[0][0], item[1])):
        where = "every rank" if len(ranks) == explanation.schedule.world_size else f"rank {ranks_text(ranks)}"
        lines.append(f"{f'c{chunk} on ' if several else 'on '}{where}: {_short_order(text, sign)}")
    if len(lines) > _SHOWN_ORDERS:
        lines[_SHOWN_ORDERS - 1 :] = [f"… and {len(lines) - _SHOWN_ORDERS + 1} more"]
    return lines


def _short_order(text: str, sign: str) -> str:
    """The order as it is, or, where it is long, its ends."""
    if len(text) <= _LONG_ORDER:
        return text
    inner = text.lstrip("(")
    if "(" in inner or len(text) - len(inner) < 2 or "…" in inner:
        return f"{text[: _LONG_ORDER // 2]} … {text[-_LONG_ORDER // 2 :]}"
    names = inner.replace(")", "").split(sign)
    return f"{f' {sign} '.join(names[:4])} {sign} … {sign} {f' {sign} '.join(names[-2:])}, one after the other"


def _write_steps(explanation: Explanation, out: Output, full: bool) -> None:
    out.heading("Played, one thread a rank")
    names = _used_names(explanation)
    shown = names if full else names[:_SHOWN_SLOTS]
    out.paragraph(_steps_note(explanation, names, shown), "dim")
    rows, gaps = [], []
    for step in explanation.steps:
        for rank in explanation.ranks:
            picture = next((each for each in explanation.stories[rank].pictures if each.step == step), None)
            label = "start" if step < 0 else str(step)
            if picture is not None:
                first = rank == explanation.ranks[0]
                rows.append([label if first else "", str(rank), *_picture_cells(explanation, picture, shown, full)])
        gaps.append(len(rows) - 1)
    headers = ["step", "rank", "what it does", "data", *(f"slot {name}" if name.isupper() else name for name in shown)]
    widths = [max(len(header), *(len(row[place]) for row in rows)) for place, header in enumerate(headers)]
    others = sum(widths) - widths[2] + 2 * (len(headers) - 1)
    width = min(max(_MOVES_WIDTH[0], out.width - others), _MOVES_WIDTH[1])
    for row in rows:
        row[2] = _packed(row[2].split(", "), width)
    out.table([Column(each, "right" if each == "rank" else "left") for each in headers], rows, separate=gaps[:-1])
    _write_left_out(explanation, out)
    _write_results(explanation, out)


def _used_names(explanation: Explanation) -> list[str]:
    """The staging buffers that ever hold something on the ranks that are shown."""
    stories = [explanation.stories[rank] for rank in explanation.ranks]
    names = max((story.staging_names for story in stories), key=len)
    held = [picture.buffers for story in stories for picture in story.pictures]
    return [name for name in names if any(name in each and bool(each[name][1].any()) for each in held)]


def _write_results(explanation: Explanation, out: Output) -> None:
    out.line()
    if explanation.num_checked:
        out.line(f"Results on all ranks, against NumPy: {'MISMATCH' if explanation.wrong_results else 'OK'}")
    for text in explanation.wrong_results[:4]:
        out.line(f"MISMATCH: {text}", "bold red")


def _steps_note(explanation: Explanation, names: Sequence[str], shown: Sequence[str]) -> str:
    notes = ["A -> 1 sends slot A to rank 1, B <- 2 receives into slot B from rank 2."] if names else []
    schedule = explanation.schedule
    if schedule.num_chunks > 1:
        itemsize = explanation.stories[0].plan.itemsize
        spans = [schedule.chunk_span(chunk, explanation.numel, itemsize) for chunk in range(schedule.num_chunks)]
        empty = [chunk for chunk, (start, stop) in enumerate(spans) if start == stop]
        if empty:
            listed = ", ".join(f"c{chunk} data[{a}:{b}]" for chunk, (a, b) in enumerate(spans) if b > a)
            notes.append(f"Chunks start at multiples of {ALIGNMENT_NBYTES} bytes: {listed}; the others are empty.")
    if explanation.repeats > 1:
        notes.append(f"Each number stands for {explanation.repeats} equal elements.")
    if len(shown) < len(names):
        left_out = names[len(shown) :]
        notes.append(f"Left out: slot {', '.join(left_out)}; --full shows all.")
    return " ".join(notes)


def _picture_cells(explanation: Explanation, picture: Picture, names: Sequence[str], full: bool) -> list[str]:
    values, valid = picture.buffers["data"]
    words = [" ".join(_elided(move.split(" "), full)) for move in picture.moves]
    cells = [", ".join(_elided(words, full)), _values_text(values, valid, explanation.repeats, full)]
    for name in names:
        held = picture.buffers.get(name)
        is_filled = held is not None and bool(held[1].any())
        cells.append(_values_text(held[0][held[1]], None, explanation.repeats, full) if held and is_filled else "")
    return cells


def _elided(words: Sequence[str], full: bool) -> Sequence[str]:
    """The words, or, where they are many, the first and the last few."""
    return words if full or len(words) <= _SHOWN_WORDS else [*words[:4], "…", *words[-3:]]


def _packed(moves: Sequence[str], width: int) -> str:
    """Moves in lines of at most ``width``; only one that is longer by itself is broken."""
    lines = [""]
    for number, move in enumerate(moves):
        text = move + ("," if number + 1 < len(moves) else "")
        if lines[-1] and len(lines[-1]) + 1 + len(text) > width:
            lines.append("")
        lines[-1] += f" {text}" if lines[-1] else text
    return "\n".join(part for line in lines for part in textwrap.wrap(line, width) or [""])


def _values_text(values: torch.Tensor, valid: torch.Tensor | None, repeats: int, full: bool) -> str:
    if repeats > 1 and values.numel() % repeats == 0:
        grouped = values.view(-1, repeats)
        if bool((grouped == grouped[:, :1]).all()):
            values, valid = grouped[:, 0], None if valid is None else valid.view(-1, repeats)[:, 0]
    texts = element_texts(values)
    if valid is not None:
        texts = [text if is_valid else "." for text, is_valid in zip(texts, valid.tolist())]
    if not full and len(texts) > _SHOWN_ELEMENTS:
        texts = [*texts[:3], "…", *texts[-2:]]
    return f"[{', '.join(texts)}]"
