"""An explanation as data."""

from __future__ import annotations

import math
from typing import Any

import torch

from microddp.cli.explain import Explanation, Traffic
from microddp.cli.formulas import Share, Term, num_steps_formula
from microddp.cli.playback import Picture

__all__ = ["as_json"]


def as_json(explanation: Explanation) -> dict[str, Any]:
    """What JSON can hold; elements that hold nothing yet are null, infinities and NaN are strings."""
    schedule, proof = explanation.schedule, explanation.proof
    steps_formula = num_steps_formula(schedule.algorithm, schedule.world_size)
    orders = [
        {"rank": rank, "chunk": chunk, "order": proof.order(chunk, rank)}
        for rank, chunk in proof.places()
        if explanation.op and rank in explanation.ranks
    ]
    return {
        "algorithm": schedule.algorithm,
        "collective": schedule.collective,
        "order": explanation.order,
        "ranks": schedule.world_size,
        "root": schedule.root if schedule.entry.rooted else None,
        "op": explanation.op.name if explanation.op else None,
        "dtype": explanation.dtype,
        "numel": explanation.numel,
        "nbytes": explanation.nbytes,
        "timetable": schedule.render().splitlines(),
        "proof": {
            "steps": proof.num_steps,
            "steps_formula": None if steps_formula is None else steps_formula.text,
            "messages": proof.num_messages,
            "same_bits": proof.same_bits,
            "rank_order": proof.rank_order,
            "orders": orders,
        },
        "steps": [
            {"step": step, "ranks": [_rank(explanation, rank, step) for rank in explanation.ranks]}
            for step in explanation.steps
        ],
        "bytes": [_traffic(each) for each in explanation.traffic],
        "wrong_results": explanation.wrong_results,
        "ok": explanation.is_right,
    }


def _rank(explanation: Explanation, rank: int, step: int) -> dict[str, Any]:
    picture = next((each for each in explanation.stories[rank].pictures if each.step == step), None)
    return {"rank": rank, **({} if picture is None else _picture(picture))}


def _picture(picture: Picture) -> dict[str, Any]:
    held = {name: _values(values, valid) for name, (values, valid) in picture.buffers.items()}
    return {
        "moves": list(picture.moves),
        "sent_from": list(picture.sent_from),
        "received_into": list(picture.received_into),
        "data": held.pop("data"),
        "slots": {name: None if all(each is None for each in values) else values for name, values in held.items()},
    }


def _values(values: torch.Tensor, valid: torch.Tensor) -> list[Any]:
    pairs = zip(values.tolist(), valid.tolist())
    return [_number(value) if is_valid else None for value, is_valid in pairs]


def _number(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _traffic(each: Traffic) -> dict[str, Any]:
    return {
        "rank": each.rank,
        "role": each.share.role if each.share else None,
        "sent": each.sent,
        "received": each.received,
        "sent_by_schedule": each.scheduled_sent,
        "received_by_schedule": each.scheduled_received,
        "formula": _share(each.share) if each.share else None,
        "ok": each.is_right,
    }


def _share(share: Share) -> dict[str, Any]:
    terms = {"sent": share.sent, "received": share.received, "both": share.both}
    return {**{name: _term(term) for name, term in terms.items()}, "tolerance": share.tolerance_nbytes}


def _term(term: Term) -> dict[str, Any]:
    return {"text": term.text, "nbytes": float(term.nbytes)}
