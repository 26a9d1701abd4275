"""Copies of any strides, conversions, pack and unpack, against positions and roundings computed in NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from microddp_kernels.launchers import EagerLauncher, Launcher
from microddp_kernels.launchers.compiled import CompiledLauncher
from microddp_kernels.launchers.interpreter import InterpreterLauncher
from microddp_kernels.launchers.packs import make_table, pack_on_blocks
from microddp_kernels.launchers.strides import collapsed, tiled
from tests.kernels.oracle import Array, Guarded, bits_of, encode, same, sample, values_of

pytestmark = pytest.mark.timeout(60)

BLOCK = 64
LAUNCHERS: dict[str, Launcher] = {"eager": EagerLauncher(), "interpreter": InterpreterLauncher(block=BLOCK)}
on_each_launcher = pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=LAUNCHERS.keys())
ONE_OF_EACH_SIZE = (torch.bool, torch.bfloat16, torch.float32, torch.complex64, torch.complex128)

View = Callable[[torch.Tensor], torch.Tensor]
LAYOUTS: dict[str, tuple[tuple[int, ...], View]] = {
    "dense": ((6, 24), lambda base: base),
    "column": ((24, 3), lambda base: base[:, 1]),
    "every third": ((150,), lambda base: base[::3]),
    "rows of a wider one": ((7, 32), lambda base: base[:, 4:28]),
    "odd rows of a wider one": ((7, 33), lambda base: base[:, 1:28]),
    "transposed": ((37, 21), lambda base: base.t()),
    "transposed, multiples of 16": ((48, 32), lambda base: base[:, :16].t()),
    "heads": ((2, 3, 16, 8), lambda base: base.permute(0, 2, 1, 3)),
    "channels last": ((2, 9, 10, 5), lambda base: base.permute(0, 3, 1, 2)),
    "reversed dimensions": ((3, 2, 4, 2, 5), lambda base: base.permute(4, 3, 2, 1, 0)),
    "six others": ((3,) * 8, lambda base: base[:2, :2, :2, :2, :2, :2, 1:, 1:]),
    "too many dimensions": ((3,) * 9, lambda base: base[:2, :2, :2, :2, :2, :2, :2, 1:, 1:]),
    "ones among the dimensions": ((1, 9, 1, 8, 1), lambda base: base.permute(4, 3, 2, 1, 0)),
    "a single element": ((5, 5), lambda base: base[3, 2]),
    "nothing": ((5, 4), lambda base: base[:, :0]),
}
EXPANDED: dict[str, tuple[tuple[int, ...], View]] = {
    "one value": ((1,), lambda base: base.expand(70)),
    "a row again and again": ((1, 20), lambda base: base.expand(9, 20)),
    "a column again and again": ((20, 1), lambda base: base.expand(20, 9)),
    "windows that overlap": ((40,), lambda base: base.unfold(0, 8, 2)),
}


def positions(tensor: torch.Tensor) -> Array:
    """Where each element is, in elements from the start of the storage, in the order of the indices."""
    found = np.full(tensor.shape, tensor.storage_offset(), dtype=np.int64)
    for grid, stride in zip(np.indices(tensor.shape), tensor.stride(), strict=True):
        found += grid * stride
    return found.reshape(-1)


def elements_of(storage: torch.Tensor) -> Array:
    """All memory of a 1-D tensor, an element a row of bytes."""
    rows: Array = storage.view(torch.uint8).numpy().reshape(-1, storage.element_size()).copy()
    return rows


def laid_out(layout: tuple[tuple[int, ...], View], dtype: torch.dtype, seed: int) -> torch.Tensor:
    shape, view = layout
    return view(sample(dtype, int(np.prod(shape)), seed).view(shape))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of ``tensor`` as a 1-D tensor."""
    numel = tensor.untyped_storage().nbytes() // tensor.element_size()
    return torch.as_strided(tensor, (numel,), (1,), 0)


def check_copy(launcher: Launcher, out: torch.Tensor, source: torch.Tensor) -> None:
    """Copies, and compares the whole memory of ``out`` with what is put there element by element."""
    expected, moved = elements_of(whole(out)), elements_of(whole(source))
    expected[positions(out)] = moved[positions(source)]
    assert launcher.copy(out, source) is None
    assert np.array_equal(elements_of(whole(out)), expected)
    assert np.array_equal(elements_of(whole(source)), moved), "the source was written"


@on_each_launcher
@pytest.mark.parametrize("dtype", ONE_OF_EACH_SIZE)
@pytest.mark.parametrize("layout", [*LAYOUTS, *EXPANDED])
def test_any_strides(launcher: Launcher, dtype: torch.dtype, layout: str) -> None:
    """From each layout into a dense tensor and into one of the same layout; what lies between the elements stays."""
    source = laid_out({**LAYOUTS, **EXPANDED}[layout], dtype, 1)
    dense = sample(dtype, source.numel(), 2).view(source.shape)
    check_copy(launcher, dense, source)
    if layout in LAYOUTS:
        check_copy(launcher, laid_out(LAYOUTS[layout], dtype, 3), source)


@on_each_launcher
@pytest.mark.parametrize(("into", "out_of"), [*itertools.permutations([(0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1)], 2)])
def test_every_order_of_dimensions_into_every_other(
    launcher: Launcher, into: tuple[int, ...], out_of: tuple[int, ...]
) -> None:
    """Cuts of larger tensors, so that nothing merges, with sizes around the edges of tiles."""
    shape = (3, 33, 17)
    out, source = (
        sample(torch.int32, int(np.prod(shape)) * 8, seed)
        .view([2 * shape[dim] for dim in order])
        .permute([order.index(dim) for dim in range(3)])[: shape[0], : shape[1], : shape[2]]
        for seed, order in enumerate((into, out_of))
    )
    check_copy(launcher, out, source)


FLOAT_TYPES = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
)
CONVERSIONS = [
    (out, source)
    for out, source in itertools.permutations(FLOAT_TYPES, 2)
    if source != torch.float64 or out.itemsize > 2
]


@on_each_launcher
@pytest.mark.parametrize(("out_dtype", "dtype"), CONVERSIONS)
def test_conversions(launcher: Launcher, out_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Random bits around the size of a block, then through strides on both sides."""
    for numel in (1, 15, 16, 17, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK):
        source, out = sample(dtype, numel, numel), Guarded.make(out_dtype, numel)
        assert launcher.copy(out.tensor, source) is None
        same(out.tensor, encode(values_of(source), out_dtype))
        out.check()
    source = laid_out(LAYOUTS["transposed"], dtype, 1)
    storage = sample(out_dtype, 2 * source.numel(), 2)
    before, out_view = bits_of(storage), storage[::2].view(source.shape)
    launcher.copy(out_view, source)
    same(out_view.contiguous().view(-1), encode(values_of(source).reshape(-1), out_dtype))
    assert np.array_equal(bits_of(storage)[1::2], before[1::2])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_millions_of_float32_to_float8(dtype: torch.dtype) -> None:
    """As torch converts them, but for what overflows e4m3fn: torch saturates there."""
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    edges = np.concatenate([high | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    random = np.random.default_rng(0).integers(0, 1 << 32, 2_000_000, dtype=np.uint32)
    source = torch.from_numpy(np.concatenate([edges, random]).view(np.float32))
    out = torch.empty(source.shape, dtype=dtype)
    InterpreterLauncher(block=1 << 17).copy(out, source)
    expected = bits_of(source.to(dtype))
    if dtype == torch.float8_e4m3fn:
        expected[np.abs(values_of(source)) > 464] = 0x7F
    same(out, expected)


@on_each_launcher
def test_copies_that_make_no_sense(launcher: Launcher) -> None:
    with pytest.raises(TypeError, match="copy converts between floats only: out is float32, source int32"):
        launcher.copy(torch.zeros(4), torch.zeros(4, dtype=torch.int32))
    with pytest.raises(TypeError, match="float64 cannot be copied to float8_e5m2"):
        launcher.copy(torch.zeros(4).to(torch.float8_e5m2), torch.zeros(4, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"out has shape \(4,\), source \(2, 2\)"):
        launcher.copy(torch.zeros(4), torch.zeros(2, 2))


def test_elements_that_share_memory_are_not_written() -> None:
    with pytest.raises(ValueError, match=r"out has elements that share memory: shape \(4, 3\), strides \(0, 1\)"):
        LAUNCHERS["interpreter"].copy(torch.zeros(3).expand(4, 3), torch.zeros(4, 3))


@pytest.mark.parametrize(
    ("shape", "out", "source", "itemsize", "grain", "units", "tile"),
    [
        ((512, 1024), (1024, 1), (2048, 1), 4, 4, ("columns", "columns"), (2, 1024)),
        ((512, 1024), (1024, 1), (2050, 1), 4, 1, ("columns", "columns"), (2, 1024)),
        ((512, 1023), (1024, 1), (2048, 1), 4, 1, ("columns", "columns"), (2, 1024)),
        ((512, 1024), (1024, 1), (1, 512), 2, 8, ("columns", "rows"), (32, 64)),
        ((1024, 512), (1, 1024), (512, 1), 1, 16, ("columns", "rows"), (32, 64)),
        ((8, 100), (100, 1), (0, 1), 8, 2, ("columns", "columns"), (8, 128)),
        ((100, 8), (8, 1), (1, 0), 4, 4, ("columns", "rows"), (128, 8)),
        ((4, 4), (40, 2), (40, 4), 4, 1, (None, None), (4, 4)),
    ],
)
def test_tiles(
    shape: tuple[int, ...],
    out: tuple[int, ...],
    source: tuple[int, ...],
    itemsize: int,
    grain: int,
    units: tuple[Any, ...],
    tile: tuple[int, int],
) -> None:
    """Accesses of 16 bytes where every row starts at a multiple of them; a transposition reads whole sectors too."""
    found = tiled(collapsed(shape, out, source), itemsize, 2048)
    assert (found.grain, (found.out_unit, found.source_unit), found.tile) == (grain, units, tile)


def test_dimensions_that_are_one_run_are_merged() -> None:
    assert [dim.size for dim in collapsed((2, 1, 3, 4), (12, 99, 4, 1), (24, 7, 8, 2))] == [24]
    assert [dim.size for dim in collapsed((2, 3, 4), (12, 4, 1), (16, 4, 1))] == [2, 12]
    assert [dim.size for dim in collapsed((4, 3, 2), (1, 4, 12), (1, 4, 12))] == [24]
    assert [dim.size for dim in collapsed((2, 3), (3, 1), (0, 0))] == [6]


NUMELS = (3, 0, 1, 16, 17, BLOCK, 0, 4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1, 8 * BLOCK, 5)


@on_each_launcher
@pytest.mark.parametrize("dtype", [*ONE_OF_EACH_SIZE, torch.float8_e4m3fn, torch.int64])
@pytest.mark.parametrize("shift", [0, 1])
def test_pack_and_unpack(launcher: Launcher, dtype: torch.dtype, shift: int) -> None:
    """Parts around the sizes of blocks and of programs, from 16-byte boundaries and beside them."""
    numel = sum(NUMELS)
    parts = [sample(dtype, size + shift, seed)[shift:] for seed, size in enumerate(NUMELS)]
    expected = np.concatenate([elements_of(part) for part in parts])
    packed = Guarded.make(dtype, numel + shift)
    flat = packed.tensor[shift:]
    assert launcher.pack(flat, parts) is None
    assert np.array_equal(elements_of(flat), expected)
    packed.check()
    outs = [Guarded.make(dtype, size) for size in NUMELS]
    assert launcher.unpack([out.tensor for out in outs], flat) is None
    for out, part in zip(outs, parts, strict=True):
        assert np.array_equal(elements_of(out.tensor), elements_of(part))
        out.check()


@on_each_launcher
def test_pack_of_many_tensors_of_several_dimensions(launcher: Launcher) -> None:
    parts = [torch.full((1 + index % 3, 1, index % 4), index, dtype=torch.int16) for index in range(75)]
    expected = [int(value) for part in parts for value in part.reshape(-1)]
    flat = torch.empty(len(expected), dtype=torch.int16)
    launcher.pack(flat, parts)
    assert flat.tolist() == expected
    outs = [torch.zeros_like(part) for part in parts]
    launcher.unpack(outs, flat)
    assert all(torch.equal(out, part) for out, part in zip(outs, parts, strict=True))


@on_each_launcher
def test_pack_of_nothing_and_of_what_does_not_fit(launcher: Launcher) -> None:
    launcher.pack(torch.empty(0), [])
    launcher.unpack([torch.empty(0), torch.empty(2, 0)], torch.empty(0))
    flat = torch.zeros(4)
    with pytest.raises(ValueError, match="the tensors have 5 elements in all, the packed one 4"):
        launcher.pack(flat, [torch.zeros(2), torch.zeros(3)])
    with pytest.raises(TypeError, match="tensors of one element type, got float32, int32"):
        launcher.unpack([torch.zeros(4, dtype=torch.int32)], flat)
    with pytest.raises(ValueError, match="contiguous tensors and one that is 1-D"):
        launcher.pack(flat, [torch.zeros(2, 2).t()])


def test_pack_is_one_launch() -> None:
    launches: list[tuple[int, dict[str, Any]]] = []
    parts = [torch.zeros(100), torch.zeros(0), torch.zeros(4 * BLOCK + 1)]
    pack_on_blocks(
        lambda kernel, count, arguments, constants: launches.append((count, constants)),
        torch.zeros(101 + 4 * BLOCK),
        parts,
        BLOCK,
        False,
        make_table,
    )
    assert [count for count, _ in launches] == [3]


def test_the_compiled_launcher_refuses_cpu_tensors() -> None:
    tensor, launcher = torch.zeros(4), CompiledLauncher()
    for call in (launcher.pack, launcher.unpack):
        arguments: Any = (tensor, [tensor]) if call == launcher.pack else ([tensor], tensor)
        with pytest.raises(ValueError, match="the compiled launcher works on tensors of one cuda device, got cpu"):
            call(*arguments)
