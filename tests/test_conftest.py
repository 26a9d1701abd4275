"""The checks of conftest.py can fail: a thread and a process left behind are seen, what belongs there is not."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
from multiprocessing import resource_tracker

import torch

from tests.conftest import child_pids, describe_leaks, settle


def test_a_thread_left_behind_is_seen_and_a_daemon_is_not() -> None:
    release = threading.Event()
    threads = [threading.Thread(target=release.wait, name=f"left-{daemon}", daemon=daemon) for daemon in (False, True)]
    for thread in threads:
        thread.start()
    try:
        assert describe_leaks(set(threading.enumerate()) - set(threads), child_pids(), allow_daemons=True) == [
            "thread 'left-False'"
        ]
    finally:
        release.set()
        for thread in threads:
            thread.join()


def test_a_process_left_behind_is_seen_until_it_ends() -> None:
    before = set(threading.enumerate()), child_pids()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = describe_leaks(*before, allow_daemons=True)
        assert found == [f"process {child.pid} ({sys.executable} -c input())"]
        child.communicate(b"\n")
    assert settle(lambda: describe_leaks(*before, allow_daemons=True)) == []


def test_a_daemon_process_may_outlive_a_module_but_not_the_run() -> None:
    before = set(threading.enumerate()), child_pids()
    context = multiprocessing.get_context("spawn")
    release = context.Event()
    child = context.Process(target=release.wait, daemon=True)
    child.start()
    try:
        assert describe_leaks(*before, allow_daemons=True) == []
        assert [f"process {child.pid} " in text for text in describe_leaks(*before, allow_daemons=False)] == [True]
        assert getattr(resource_tracker._resource_tracker, "_pid", None), "the helper to be left out is not running"
    finally:
        release.set()
        child.join()


def test_torch_takes_one_thread_per_rank() -> None:
    assert torch.get_num_threads() == 1
