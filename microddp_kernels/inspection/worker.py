"""The process that compiles: reads cases as lines of JSON, and answers each with a line of JSON."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any

from microddp_kernels.inspection.facts import Case

__all__ = ["main"]


def main() -> None:
    """Compiles until the input ends. What the compiler prints goes to the error stream."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from microddp_kernels.inspection.compiling import inspect_case
    from microddp_kernels.inspection.launches import PlayedGpu

    gpu = PlayedGpu()
    gpu.install()
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            case = Case(**{**request["case"], "dtypes": tuple(request["case"]["dtypes"])})
            answer["facts"] = asdict(inspect_case(gpu, case, read_sass=request["read_sass"]))
        except Exception as error:  # a user's operator can fail in any way
            answer["error"] = _text(error)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _text(error: BaseException) -> str:
    """The error and what the compiler gives as its causes: the way to it through the user's functions."""
    from triton.runtime.jit import JITFunction

    modules = [module for name, module in sys.modules.items() if name.startswith("microddp_kernels.")]
    functions = {each for module in modules for each in vars(module).values() if isinstance(each, JITFunction)}
    of_kernels = {each.src for each in functions}
    parts: list[str] = []
    while error.__cause__ is not None:
        if getattr(error, "src", None) not in of_kernels:
            parts.append(_line(error))
        error = error.__cause__
    return "\n".join(dict.fromkeys([*parts, _line(error)]))


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()}"


if __name__ == "__main__":
    main()
