"""``reduce_op``: what it makes of a declaration, and what it refuses, with the same words in every mode of Triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from microddp_kernels import Lane, ReduceOp, get_op, op_names, op_registry
from microddp_kernels.declare import reduce_op
from microddp_kernels.dtypes import BOOL, FLOATS, FLOATS8, INTEGERS, UNSIGNED
from microddp_kernels.evaluate import evaluated
from tests.kernels import user_ops, user_ops_bad

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).resolve().parents[2]
EVERY = FLOATS | FLOATS8 | INTEGERS | UNSIGNED | BOOL
TWO = {"lanes": ["x", "y"]}


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(op_registry, "_ops", dict(op_registry._ops))


def test_an_operator_with_and_without_arguments() -> None:
    bare = reduce_op(user_ops.largest)
    assert isinstance(bare, ReduceOp) and get_op("largest") is bare and get_op(bare) is bare
    assert (bare.name, bare.combine, bare.eager, bare.lanes) == ("largest", user_ops.largest, None, ())
    assert bare.dtypes == EVERY and not bare.commutative and bare.associative and bare.nan is None
    op = reduce_op(commutative=True, associative=False, name="other", nan="propagate", dtypes="floats")(
        user_ops.largest
    )
    assert get_op("other") is op and op.commutative and not op.associative and op.nan == "propagate"
    assert op.dtypes == FLOATS | FLOATS8
    found = evaluated(op).combine(torch.tensor([-3.0, 1.0]), torch.tensor([2.0, -4.0]))
    assert isinstance(found, torch.Tensor) and found.tolist() == [3.0, 4.0]


def test_everything_that_can_be_declared() -> None:
    def twin(a: Any, b: Any) -> Any:
        return a

    types: dict[str, Any] = {"value": [torch.float32, torch.float64], "mark": "integers"}
    op = reduce_op(
        lanes=["value", "mark"],
        dtypes=types,
        accumulate=torch.float64,
        finalize=user_ops.means,
        torch_function=twin,
        torch_finalize=twin,
    )(user_ops.pair)
    assert op.lanes == (
        Lane("value", frozenset({torch.float32, torch.float64})),
        Lane("mark", INTEGERS | UNSIGNED),
    )
    assert op.dtypes == op.lanes[0].dtypes and op.num_lanes == 2 and op.finishes
    assert op.accumulation_dtype(torch.float32) == torch.float64
    assert (op.finalize, op.torch_function, op.torch_finalize) == (user_ops.means, twin, twin)


def test_ways_to_name_lanes() -> None:
    wide = reduce_op(lanes=("w", "v"), wide=["v"], dtypes=torch.float32)(user_ops.rows)
    only = frozenset({torch.float32})
    assert wide.lanes == (Lane("w", only), Lane("v", only, wide=True))
    numbered = reduce_op(lanes=2)(user_ops.pair)
    assert [lane.name for lane in numbered.lanes] == ["lane0", "lane1"] and numbered.lanes[1].dtypes == EVERY
    made = reduce_op(lanes=[Lane("w", only), Lane("v", only, wide=True)])(user_ops.rows)
    assert made.lanes == wide.lanes


def test_the_same_function_declared_again_replaces_itself_and_another_does_not() -> None:
    first = reduce_op(user_ops.largest)
    again = reduce_op(commutative=True)(user_ops.largest)
    assert get_op("largest") is again is not first
    with pytest.raises(ValueError, match="operator 'largest' exists already"):
        reduce_op(name="largest")(user_ops.second)
    with pytest.raises(ValueError, match="operator 'sum' exists already"):
        reduce_op(name="sum")(user_ops.second)
    assert get_op("largest") is again


# A function, how it is declared, the error and its text.
BAD: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "plain": (user_ops_bad.plain, {}, TypeError, r"plain is not a Triton function: add @triton\.jit right above"),
    "lambda": (user_ops_bad.anonymous, {}, TypeError, r"is a lambda; .*defined by def, with @triton\.jit"),
    "number": (3, {}, TypeError, r"must be a @triton\.jit function, not 3"),
    "operator": (user_ops_bad.OPERATOR, {}, TypeError, "is an operator already: 'sum'"),
    "one value": (user_ops_bad.one_value, {}, TypeError, r"takes two values; one_value has the parameters \(a\)"),
    "three values": (user_ops_bad.three_values, {}, TypeError, r"takes two values; three_values .*\(a, b, c\)"),
    "any values": (user_ops_bad.any_values, {}, TypeError, r"takes two values; any_values .*\(\*values\)"),
    "keyword": (user_ops_bad.keyword_needed, {}, TypeError, r"takes two values; keyword_needed"),
    "constant": (user_ops_bad.constant_value, {}, TypeError, "constant_value declares b a constant"),
    "float": (user_ops_bad.global_float, {}, ValueError, r"global ALPHA.*write ALPHA = tl\.constexpr\(3\.0\)"),
    "int": (user_ops_bad.global_int, {}, ValueError, r"global COUNT.*write COUNT = tl\.constexpr\(2\)"),
    "power": (user_ops_bad.power, {}, ValueError, r"power uses \*\*, line 2 of its source: Triton has no powers"),
    "product": (user_ops_bad.matrix_power, {}, ValueError, r"matrix_power .*line 2 .* uses @, which Triton"),
    "element": (user_ops_bad.element, {}, ValueError, r"element uses a\[0\], line 2 .*for one lane: a is one value"),
    "floats by //": (user_ops_bad.floor, {"dtypes": "floats"}, ValueError, r"'floor' cannot be run: TypeError: unexp"),
    "two of three": (user_ops_bad.chosen, {}, ValueError, "'chosen' cannot be run: TypeError: .*missing 1 required"),
    "third lane": (user_ops_bad.third, TWO, ValueError, "'third' cannot be run: IndexError: tuple index out of range"),
    "member": (user_ops_bad.member, {}, ValueError, "uses in, which Triton does not compile"),
    "size": (user_ops_bad.size, {}, ValueError, "uses the size of a block: an operator is elementwise"),
    "count": (user_ops_bad.count, {}, ValueError, "uses the size of a block"),
    "tensor": (user_ops_bad.global_tensor, {}, ValueError, "global TENSOR, a Tensor; only tl.constexpr"),
    "array": (user_ops_bad.global_array, {}, ValueError, "global ARRAY, a ndarray; only tl.constexpr"),
    "helper": (user_ops_bad.calls_plain, {}, ValueError, r"calls plain_helper, a plain .*: add @triton\.jit to it"),
    "calls operator": (user_ops_bad.calls_operator, {}, ValueError, "calls OPERATOR, which is an operator"),
    "unknown": (
        user_ops_bad.unknown_name,
        {},
        ValueError,
        r"unknown_name of .* \(line 2 .*\) uses beta, ",
    ),
    "unknown in tl": (user_ops_bad.unknown_in_triton, {}, ValueError, r"uses tl\.maximun, which is not defined"),
    "later": (user_ops_bad.calls_later, {}, ValueError, "uses defined_later, .*must be defined above"),
    "abs": (user_ops_bad.python_abs, {}, ValueError, "uses Python's abs, which Triton does not compile"),
    "max": (user_ops_bad.python_max, {}, ValueError, r"uses Python's max, .*: use tl\.maximum"),
    "sum": (user_ops_bad.sums, {}, ValueError, r"uses tl\.sum, which works across elements: an operator is element"),
    "sum imported": (user_ops_bad.sums_imported, {}, ValueError, "uses total, which works across elements"),
    "sum by method": (user_ops_bad.sums_by_method, {}, ValueError, r"uses \.sum, which works across elements"),
    "transposed": (user_ops_bad.transposes, {}, ValueError, r"uses \.T, which changes the shape"),
    "place": (user_ops_bad.knows_place, {}, ValueError, r"tl\.program_id, which depends on where an element lies"),
    "load": (user_ops_bad.loads, {}, ValueError, r"tl\.load, which accesses memory"),
    "sort in helper": (user_ops_bad.helped, {}, ValueError, r"helper_that_sorts of .* uses tl\.sort"),
    "recursion": (user_ops_bad.endless, {}, ValueError, "calls endless, .*Triton has no recursion"),
    "nothing": (user_ops_bad.returns_nothing, {}, ValueError, "returns_nothing returns nothing"),
    "two of one": (user_ops_bad.returns_two, {}, ValueError, "returns 2 values.* for 1 lane$"),
    "two or one": (user_ops_bad.returns_two_or_one, {}, ValueError, "returns 2 values.* for 1 lane$"),
    "two by helper": (user_ops_bad.returns_two_by_helper, {}, ValueError, "has one lane, but returned 2 values"),
    "three of two": (user_ops_bad.returns_three, TWO, ValueError, "returns 3 values.* for 2 lanes"),
    "one of two": (user_ops_bad.returns_number, TWO, ValueError, "returns 1 value, .* for 2 lanes"),
    "takes three": (user_ops_bad.takes_three, TWO, ValueError, "takes 3 values from a, which has 2 lanes"),
    "one by calculation": (user_ops_bad.adds_first, TWO, ValueError, "has 2 lanes, but returned 1 values"),
    "wide in narrow": (user_ops_bad.broadcasts, {**TWO, "wide": ["y"]}, ValueError, "narrow lane gets must not depend"),
    "lambda inside": (user_ops_bad.has_lambda, {}, ValueError, "uses lambda, which Triton does not compile"),
    "try": (user_ops_bad.has_try, {}, ValueError, "uses try, which Triton does not compile"),
    "if": (user_ops_bad.asks_if, {}, ValueError, r"`if` and `while` take no tensor.*use tl\.where"),
    "if expression": (user_ops_bad.asks_which, {}, ValueError, r"`if` and `while` take no tensor.*use tl\.where"),
    "and": (user_ops_bad.uses_and, {}, ValueError, "`and` of tensors .*use &"),
    "not": (user_ops_bad.uses_not, {}, ValueError, "`not` of tensors .*use ~"),
    "finalize of one": (
        user_ops.largest,
        {"finalize": user_ops_bad.finalize_of_one},
        TypeError,
        "finalize takes the fold and world_size; finalize_of_one",
    ),
    "plain finalize": (user_ops.largest, {"finalize": user_ops_bad.plain}, TypeError, "finalize plain is not a Triton"),
    "finalize that sums": (
        user_ops.largest,
        {"finalize": user_ops_bad.finalize_that_sums},
        ValueError,
        r"finalize_that_sums .*tl\.sum",
    ),
}
DECLARED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"commutative": 1}, TypeError, "commutative must be True or False, not 1"),
    ({"associative": None}, TypeError, "associative must be True or False, not None"),
    ({"name": 3}, TypeError, "name must be a string, not 3"),
    ({"name": ""}, ValueError, "name must not be empty"),
    ({"nan": "maybe"}, ValueError, "nan must be 'propagate', 'ignore' or None, not 'maybe'"),
    ({"nan": "ignore", "dtypes": "integers"}, ValueError, "nan='ignore' is claimed, but no lane may be a float"),
    ({"torch_function": 3}, TypeError, "torch_function must be a function"),
    ({"torch_finalize": len}, ValueError, "torch_finalize is the torch form of finalize, which is not given"),
    ({"accumulate": "float64"}, TypeError, "accumulate must be an element type, not 'float64'"),
    ({"accumulate": torch.float16}, ValueError, "nothing is accumulated in float16"),
    ({"accumulate": torch.float32}, ValueError, "accumulate=float32 is no wider than"),
    ({"accumulate": torch.float64, "dtypes": "integers"}, ValueError, "no wider .* none of its kind"),
    ({"accumulate": torch.float64, "dtypes": torch.float64}, ValueError, "no wider than .*: float64"),
    (
        {"accumulate": torch.uint64},
        ValueError,
        "uint64 cannot hold the negative numbers of int16, int32, int8",
    ),
    ({"dtypes": "numbers"}, ValueError, "dtypes must be element types, 'floats' or 'integers', not 'numbers'"),
    ({"dtypes": 3}, TypeError, "must be element types, 'floats' or 'integers', not 3"),
    ({"dtypes": ["float32"]}, TypeError, "must be element types, not 'float32'"),
    ({"dtypes": []}, ValueError, "names no element type"),
    ({"dtypes": torch.complex64}, ValueError, "dtypes names complex64; .*built-in"),
    ({"dtypes": {"x": "floats"}}, ValueError, "dtypes names x, which is no lane; the operator has one lane"),
    ({"wide": ["x"]}, ValueError, "wide names x, which is no lane"),
    ({"lanes": 0}, ValueError, "lanes must be at least 1, got 0"),
    ({"lanes": True}, TypeError, "lanes must be a number or a sequence of names, not True"),
    ({"lanes": "xy"}, TypeError, "lanes must be a number or a sequence of names, not 'xy'"),
    ({"lanes": ["x"]}, ValueError, r"at least 2 lanes, got \['x'\]"),
    ({"lanes": ["x", 3]}, TypeError, "a lane is a name or a Lane, not 3"),
    ({"lanes": ["x", "x"]}, ValueError, "two lanes have one name: x, x"),
    ({"lanes": ["x", "y"], "wide": ["z"]}, ValueError, "wide names z, which is no lane; the lanes are x, y"),
    ({"lanes": ["x", "y"], "wide": "y"}, TypeError, "wide must be a sequence of names"),
    ({"lanes": ["x", "y"], "wide": ["x", "y"]}, ValueError, "every lane is declared wide"),
    ({"lanes": ["x", Lane("y", EVERY)], "dtypes": {"y": "floats"}}, ValueError, "types of lane 'y' are given twice"),
    ({"comutative": True}, TypeError, "unknown arguments: comutative"),
]


@pytest.mark.parametrize("case", BAD)
def test_functions_that_are_refused(case: str) -> None:
    function, declared, error, text = BAD[case]
    before = op_names()
    with pytest.raises(error, match=text):
        reduce_op(**declared)(function)
    assert op_names() == before


@pytest.mark.parametrize(("declared", "error", "text"), DECLARED, ids=lambda each: str(each)[:40])
def test_declarations_that_are_refused(declared: dict[str, Any], error: type[Exception], text: str) -> None:
    function = user_ops.pair if isinstance(declared.get("lanes"), list) else user_ops.largest
    with pytest.raises(error, match=text):
        reduce_op(**declared)(function)


def test_functions_without_a_source_are_refused() -> None:
    scope: dict[str, Any] = {}
    exec("def made(a, b):\n    return a + b\n", scope)
    function = triton.JITFunction.__new__(triton.JITFunction)
    function.fn = scope["made"]  # triton.jit refuses it itself
    with pytest.raises(ValueError, match=r"source of made .*cannot be found; .*defined in a file or a notebook cell"):
        reduce_op(function)
    with pytest.raises(TypeError, match="a function alone, or keyword arguments alone"):
        reduce_op(user_ops.largest, commutative=True)  # type: ignore[call-overload]


def _verdict(function: Any, declared: dict[str, Any]) -> str:
    try:
        return reduce_op(**declared)(function).fingerprint
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def verdicts() -> dict[str, str]:
    """What ``reduce_op`` says, the reason or the fingerprint, of bad functions and good ones."""
    found = {name: _verdict(*case[:2]) for name, case in BAD.items() if name not in ("number", "calls operator")}
    found["of one lane"] = _verdict(user_ops.helped, {})
    found["with types"] = _verdict(user_ops.largest, {"commutative": True, "dtypes": "floats"})
    found["of two lanes"] = _verdict(user_ops.rows, {**TWO, "wide": ["y"], "finalize": user_ops.means})
    found["with torch"] = _verdict(user_ops.largest, {"torch_function": _verdict})
    return found


def test_one_verdict_and_one_fingerprint_in_every_mode_and_process() -> None:
    usual = verdicts()
    code = "import json; from tests.kernels.test_declare import verdicts; print(json.dumps(verdicts()))"
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=50)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == usual
    assert all(text.startswith(BAD[name][2].__name__) for name, text in usual.items() if name in BAD)
    prints = [text for name, text in usual.items() if name not in BAD]
    assert len(set(prints)) == 4 and all(len(each) == 8 and int(each, 16) >= 0 for each in prints)


def test_without_triton_declaring_says_what_is_missing_and_the_module_is_imported() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import microddp, microddp_kernels.declare as declare\n"
        "try:\n    declare.reduce_op(lambda a, b: a)\nexcept TypeError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=50)
    assert done.returncode == 0, done.stderr
    assert "@triton.jit" in done.stdout
