"""Trains a small network on handwritten digits: on every rank with a share of each batch, or alone on all of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from microddp.cli.output import Output

if TYPE_CHECKING:
    from microddp.communicator import Communicator

__all__ = ["Digits", "Method", "MethodRun", "RankReport", "TrainingPlan", "split_digits", "train_alone", "train_rank"]

NUM_TEST: Final = 360
HIDDEN: Final = 64
LEARNING_RATE: Final = 0.1
MOMENTUM: Final = 0.9
CORRUPTION: Final = 1e-3
"""What ``--corrupt`` adds to one element of one rank's averaged gradient, in one step."""

_BOUND: Final = 64**-0.5  # both layers have 64 inputs
WARMUP, ITERATIONS = 2, 11
Average = Callable[[torch.Tensor, int], None]  # a bucket of gradients, in place, in step number …


@dataclass(frozen=True, slots=True)
class Digits:
    """Images, shape (samples, 64), from 0 to 1, and their digits, shape (samples,), cut for training and testing."""

    train_images: torch.Tensor
    train_digits: torch.Tensor
    test_images: torch.Tensor
    test_digits: torch.Tensor


@dataclass(frozen=True, slots=True)
class Method:
    """An algorithm, and its variant."""

    algorithm: str
    order: str | None = None


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What every rank does; plain data, as it travels to the ranks.

    Attributes:
        world_size: into how many equal shares each batch is cut.
        batch_size: of the whole batch; a multiple of world_size.
        corrupt: None, or the rank whose averaged gradient is spoilt in one step.
        compared: what is compared on the last step's gradients.
        live: rank 0 prints each epoch.
    """

    world_size: int
    epochs: int
    batch_size: int
    seed: int
    method: Method
    corrupt: int | None
    compared: tuple[Method, ...]
    live: bool


@dataclass(frozen=True, slots=True)
class MethodRun:
    """One all-reduce of the real gradients on one rank; the times are of repetitions of it."""

    result: torch.Tensor
    bytes_sent: int
    bytes_received: int
    seconds: list[float]


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank ends with. ``history`` holds (loss on all training images, accuracy on the test images)."""

    parameters: torch.Tensor
    history: list[tuple[float, float]]
    gradient: torch.Tensor
    runs: list[MethodRun]


def split_digits(images: torch.Tensor, digits: torch.Tensor, seed: int) -> Digits:
    """Cuts the data into training and test samples at random."""
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(seed))
    test, train = order[:NUM_TEST], order[NUM_TEST:]
    return Digits(images[train], digits[train], images[test], digits[test])


def train_alone(plan: TrainingPlan, digits: Digits) -> torch.Tensor:
    """The parameters after training on whole batches in this process, with nothing of the library."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trainer = _Trainer(plan, digits, share=slice(None))
        for _ in trainer.epochs(lambda gradient, step: None):
            pass
        return trainer.parameters()
    finally:
        torch.set_num_threads(threads)


def train_rank(comm: Communicator, plan: TrainingPlan, digits: Digits) -> RankReport:
    """One rank's training and its runs of the compared algorithms."""
    torch.set_num_threads(1)
    per_rank = plan.batch_size // plan.world_size
    trainer = _Trainer(plan, digits, slice(comm.rank * per_rank, (comm.rank + 1) * per_rank))
    comm.broadcast(trainer.flat, root=0)
    last = torch.empty(0)

    def average(bucket: torch.Tensor, step: int) -> None:
        nonlocal last
        last = bucket.clone()
        comm.all_reduce(bucket, op="avg", algorithm=plan.method.algorithm, order=plan.method.order)
        if comm.rank == plan.corrupt and step == trainer.num_steps // 2:
            bucket[0] += CORRUPTION

    history = []
    for epoch, figures in enumerate(trainer.epochs(average)):
        history.append(figures)
        if plan.live and comm.rank == 0:
            Output().line(f"{epoch + 1:5d}  {figures[0]:8.4f}  {figures[1]:12.2%}")
    runs = [_run_method(comm, each, last) for each in plan.compared]
    return RankReport(trainer.parameters(), history, last, runs)


class _Trainer:
    """SGD with momentum on a network of one hidden layer, all of whose parameters lie in one flat tensor."""

    def __init__(self, plan: TrainingPlan, digits: Digits, share: slice) -> None:
        self.plan, self.digits, self.share = plan, digits, share
        self.loss = torch.nn.CrossEntropyLoss()
        self.model = torch.nn.Sequential(torch.nn.Linear(64, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, 10))
        generator = torch.Generator().manual_seed(plan.seed)
        self.flat, self.bucket = self._flatten()
        self.flat.uniform_(-_BOUND, _BOUND, generator=generator)
        self.velocity = torch.zeros_like(self.flat)
        self.steps_per_epoch = len(digits.train_digits) // plan.batch_size
        self.num_steps = plan.epochs * self.steps_per_epoch

    def parameters(self) -> torch.Tensor:
        """A copy of all parameters, 1-D."""
        return self.flat.clone()

    def epochs(self, average: Average) -> Iterator[tuple[float, float]]:
        """Trains; yields the loss and the accuracy after each epoch."""
        generator = torch.Generator().manual_seed(self.plan.seed)
        for epoch in range(self.plan.epochs):
            order = torch.randperm(len(self.digits.train_digits), generator=generator)
            for number in range(self.steps_per_epoch):
                batch = order[number * self.plan.batch_size : (number + 1) * self.plan.batch_size]
                self._step(batch[self.share], average, epoch * self.steps_per_epoch + number)
            yield self._evaluate()

    def _step(self, samples: torch.Tensor, average: Average, step: int) -> None:
        self.bucket.zero_()
        prediction = self.model(self.digits.train_images[samples])
        self.loss(prediction, self.digits.train_digits[samples]).backward()
        average(self.bucket, step)
        # By hand, as torch.optim takes each process seconds to import.
        self.velocity.mul_(MOMENTUM).add_(self.bucket[: self.flat.numel()])
        self.flat.sub_(self.velocity, alpha=LEARNING_RATE)

    def _evaluate(self) -> tuple[float, float]:
        digits = self.digits
        with torch.no_grad():
            loss = self.loss(self.model(digits.train_images), digits.train_digits)
            right = self.model(digits.test_images).argmax(1) == digits.test_digits
        return float(loss), float(right.double().mean())

    def _flatten(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Moves parameters and gradients into two flat tensors, and leaves views of them in their place.

        The bucket of gradients is padded with zeros so that its bytes divide by 16n: chunks are then equal, and what
        is counted can be compared with the formulas byte by byte.
        """
        parameters = list(self.model.parameters())
        flat = torch.cat([each.detach().flatten() for each in parameters])
        unit = 4 * self.plan.world_size
        bucket = torch.zeros(-(-flat.numel() // unit) * unit)
        start = 0
        for each in parameters:
            span = slice(start, start + each.numel())
            each.data = flat[span].view_as(each)
            each.grad = bucket[span].view_as(each)
            start += each.numel()
        return flat, bucket


def _run_method(comm: Communicator, method: Method, gradient: torch.Tensor) -> MethodRun:
    result = torch.empty_like(gradient)
    seconds = []
    for number in range(WARMUP + ITERATIONS):
        comm.barrier()
        before = comm.counters.bytes_sent, comm.counters.bytes_received
        start = time.perf_counter()
        comm.all_reduce(gradient, op="avg", algorithm=method.algorithm, order=method.order, out=result)
        stop = time.perf_counter()
        after = comm.counters.bytes_sent, comm.counters.bytes_received
        if number >= WARMUP:
            seconds.append(stop - start)
    return MethodRun(result, after[0] - before[0], after[1] - before[1], seconds)
