"""Several processes that work for one part: workers that share a list, or the ranks of one world."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from bench.device.processes import Child, wait_until
from bench.device.records import Context, Outcome, checks_of

__all__ = ["NEEDED_BY_MULTI_RANK", "WAYS", "Team", "World", "adopt", "known_way", "remember_way", "run_job"]

_HOST: Final = "127.0.0.1"
_PREPARE: Final = "bench.device.joint:prepare"
_SURVIVORS_S: Final = 6.0
"""After one rank has failed: for the others to say what they saw."""

_EXIT_S: Final = 8.0
_END_S: Final = 3.0
"""Of the time, for closing and ending the processes."""

_SOCKETS: Final = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_MAX_CTAS": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_DEBUG": "WARN",
}
WAYS: Final = ("hosts", "multi_rank")
"""How several ranks share a GPU: each says that it is another host; or NCCL 2.30.3 and later are told to allow it."""

NEEDED_BY_MULTI_RANK: Final = 23003
"""The version of NCCL, as it writes it."""


class Team:
    """Processes that run one function; started at once, and ended when this is left."""

    def __init__(
        self, context: Context, name: str, function: str, environments: Sequence[Mapping[str, str]], prepare: str = ""
    ) -> None:
        """Starts one process for each environment; ``prepare`` is called before they are told to go."""
        self.name = name
        self.children: list[Child] = []
        try:
            for number, env in enumerate(environments):
                label = f"{name}-{number}"
                child = Child(label, function, context.folder, prepare=prepare, stand_in=context.stand_in, env=env)
                self.children.append(child)
        except BaseException:
            self.close()
            raise

    def run(self, seconds: float, **options: Any) -> list[Outcome]:
        """Has them all work and returns how it went, in order; ends those that do not end in time."""
        deadline = time.monotonic() + seconds
        if not wait_until(lambda: all(each.is_ready() for each in self.children), deadline):
            return self.close()
        left = max(deadline - time.monotonic(), 0.0)
        for number, child in enumerate(self.children):
            child.go(min(left * 0.9, left - _END_S), number=number, count=len(self.children), **options)
        wait_until(lambda: self._is_over(), deadline)
        if any(child.has_failed() for child in self.children):
            wait_until(self._have_finished, min(deadline, time.monotonic() + _SURVIVORS_S))
        wait_until(lambda: all(child.has_ended() for child in self.children), min(deadline, time.monotonic() + _EXIT_S))
        return self.close()

    def close(self) -> list[Outcome]:
        """Ends them."""
        children, self.children = self.children, []
        return [child.finish() for child in children]

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _have_finished(self) -> bool:
        return all(child.has_finished() for child in self.children)

    def _is_over(self) -> bool:
        return self._have_finished() or any(child.has_failed() for child in self.children)


class World(Team):
    """The ranks of one communicator, all on the first GPU, with a store that this process hosts."""

    def __init__(self, context: Context, name: str, function: str, world_size: int, way: str = WAYS[0]) -> None:
        """Starts them; ``way`` is one of ``WAYS``."""
        self.world_size, self.way = world_size, way
        self._store = TCPStore(_HOST, 0, None, True, wait_for_workers=False)
        environments = [self._environment(rank, way) for rank in range(world_size)]
        super().__init__(context, f"{name}-{way}-{world_size}", function, environments, _PREPARE)

    def _environment(self, rank: int, way: str) -> dict[str, str]:
        launched = {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 does not host the store: this process does
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        if self.world_size == 1:
            return launched
        apart = {"NCCL_HOSTID": f"device-check-{rank}"} if way == WAYS[0] else {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        return {**launched, **_SOCKETS, **apart}


def adopt(context: Context, label: str, outcomes: Sequence[Outcome]) -> bool:
    """Reports what the members of a team reported: a check is right if it is on all of them, and all did it.

    Figures and notes are those of the first. Returns whether all ended well.
    """
    names = list(dict.fromkeys(each["name"] for outcome in outcomes for each in checks_of(outcome.records)))
    found = [{each["name"]: each for each in checks_of(outcome.records)} for outcome in outcomes]
    all_end = all(outcome.status in ("ok", "FAILED") for outcome in outcomes)
    for name in names:
        wrong = [f"rank {rank}: {each[name]['detail']}" for rank, each in enumerate(found) if not _ok(each.get(name))]
        missing = [rank for rank, each in enumerate(found) if name not in each]
        if missing and not all_end:
            continue  # it was doing this when something ended it: told below
        wrong = [f"not done on ranks {missing}"] if missing else wrong
        context.check(f"{label}: {name}", not wrong, "; ".join(wrong))
    for rank, outcome in enumerate(outcomes):
        if outcome.status not in ("ok", "FAILED"):
            context.check(f"{label}: rank {rank}", False, f"{outcome.status}: {outcome.detail}")
            context.note(f"{label}: rank {rank}", {"errors": outcome.errors, "records": list(outcome.records)[-20:]})
    for each in outcomes[0].records if outcomes else ():
        if each["kind"] in ("figure", "note"):
            context.write(**{**each, "name": f"{label}: {each['name']}"})
    return all_end


def _ok(check: dict[str, Any] | None) -> bool:
    return check is None or bool(check["ok"])


def run_job(context: Context, function: str, sizes: Sequence[int], worlds: Sequence[World]) -> list[str]:
    """Runs a job on worlds of these sizes, started before if among ``worlds``; returns which of them ran to the end."""
    done = []
    for number, size in enumerate(sizes):
        seconds = context.left() / (len(sizes) - number)
        way = known_way(context)
        if way is None and size > 1:
            context.note(f"n={size}", "left out: two ranks cannot share this GPU, as part ranks found")
            continue
        way = way or WAYS[0]
        found = next((each for each in worlds if (each.world_size, each.way) == (size, way)), None)
        context.step(f"n={size}")
        with found or World(context, function.partition(":")[0].rpartition(".")[2], function, size, way) as world:
            outcomes = world.run(seconds)
        if adopt(context, f"n={size}", outcomes):
            done.append(f"n={size}")
    return done


def known_way(context: Context) -> str | None:
    """How several ranks share this GPU, as found by an earlier part; the first way if none has tried, None: none."""
    path = _way_file(context.folder)
    found: str | None = json.loads(path.read_text()) if path.exists() else WAYS[0]
    return found


def remember_way(context: Context, way: str | None) -> None:
    """For ``known_way``, in this run."""
    _way_file(context.folder).write_text(json.dumps(way))


def _way_file(folder: Path) -> Path:
    return folder / "way.json"
