"""The parts of ``bench/device_check.py``: each runs in a process of its own and reports by lines of JSON."""
