"""Calls that are meant otherwise than they are written: by hand, or by TensorFlow's names of arguments."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mirrored
from tests.support.jobs import all_raise, towers


def two_arguments(x: Any, y: Any = None) -> Any:
    return x


X, Y = torch.ones(4, 3), torch.zeros(4)
RIGHT = "strategy.run(two_arguments, args=(x, y))"
POSITIONAL = f"args is a tuple or list of the positional arguments: {RIGHT}"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: s.run(two_arguments, X, Y), f"a value of type Tensor and shape (4, 3) as args, but {POSITIONAL}"),
        (lambda s: s.run(two_arguments, X), RIGHT),
        (lambda s: s.run(two_arguments, X.numpy()), "a value of type ndarray and shape (4, 3) as args"),
        (lambda s: s.run(two_arguments, {"x": X}), "as args, but args is a tuple or list of the positional arguments: "
         "strategy.run(two_arguments, args=(batch,)), or strategy.run(two_arguments, kwargs=batch)"),
        (lambda s: s.run(two_arguments, "ab"), RIGHT),
        (lambda s: s.run(two_arguments, 3), "a value of type int as args"),
        (lambda s: s.run(two_arguments, iter([X])), RIGHT),
        (lambda s: s.run(two_arguments, None), RIGHT),
        (lambda s: s.run(two_arguments, (X,), Y), "a value of type Tensor and shape (4,) as kwargs, but kwargs is a "
         f"dict of the keyword arguments: {RIGHT}"),
        (lambda s: s.run(lambda x: x, X), "strategy.run(step, args=(x, y))"),
        (lambda s: s.run(two_arguments(X)), "a value of type Tensor and shape (4, 3) as the function to call"),
        (lambda s: s.run(two_arguments, X, Y, X), "takes 3 positional arguments (fn, args, kwargs), but was given 4"),
    ],
)  # fmt: skip
def test_arguments_of_run_that_are_no_tuple(call: Callable[[mirrored.Strategy], Any], words: str) -> None:
    with pytest.raises(TypeError, match=re.escape(words)):
        call(mirrored.OneDeviceStrategy())


def without_a_tuple(strategy: mirrored.Strategy) -> None:
    strategy.run(two_arguments, X, Y)


def test_arguments_of_run_that_are_no_tuple_on_all_towers() -> None:
    all_raise(TypeError, re.escape(RIGHT), without_a_tuple)


def right(strategy: mirrored.Strategy) -> list[Any]:
    pair = (1, 2)
    return [
        strategy.run(two_arguments, pair),
        strategy.run(two_arguments, [1]),
        strategy.run(two_arguments, torch.Size([3])),
        strategy.run(two_arguments, kwargs={"x": 4}),
        strategy.run(two_arguments, (5,), None),
    ]


def test_arguments_of_run_that_are_right() -> None:
    assert right(mirrored.OneDeviceStrategy()) == [1, 1, 3, 4, 5]
    assert towers(right) == [[1, 1, 3, 4, 5]] * 2


class Options:
    """Stands for an object of TensorFlow's."""


def in_replica(call: Callable[[mirrored.ReplicaContext], Any]) -> Callable[[], Any]:
    def inside() -> Any:
        replica = mirrored.get_replica_context()
        return call(replica)

    return lambda: mirrored.OneDeviceStrategy().run(inside)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mirrored.MirroredStrategy(["cpu:0"], cross_device_ops=Options()),
         "MirroredStrategy() has no argument cross_device_ops: communication=mirrored.CommunicationOptions("),
        (lambda: mirrored.MirroredStrategy(["cpu:0"], Options()),
         "MirroredStrategy() takes 1 positional argument (devices), but was given 2; for TensorFlow's cross_device"),
        (lambda: mirrored.MultiWorkerMirroredStrategy(communication_options=Options()),
         "MultiWorkerMirroredStrategy() has no argument communication_options: communication=mirrored.Communi"),
        (lambda: mirrored.MultiWorkerMirroredStrategy(None, Options()),
         "takes 1 positional argument (cluster_resolver), but was given 2"),
        (lambda: mirrored.MultiWorkerMirroredStrategy(communication="nccl"),
         "communication is 'nccl', but has to be mirrored.CommunicationOptions(implementation='nccl', …)"),
        (lambda: mirrored.CommunicationOptions(bytes_per_pack=1), "has no argument bytes_per_pack: bucket_bytes="),
        (lambda: mirrored.OneDeviceStrategy().run(two_arguments, (1,), options=Options()),
         "Strategy.run() has no argument options"),
        (lambda: mirrored.OneDeviceStrategy().reduce(reduce_op="sum", value=1.0, axis=None),
         'Strategy.reduce() has no argument reduce_op: reduce("sum", value)'),
        (lambda: mirrored.OneDeviceStrategy().experimental_distribute_dataset(range(3), options=Options()),
         "Strategy.distribute_dataset() has no argument options"),
        (lambda: mirrored.OneDeviceStrategy().distribute_datasets_from_function(dataset_fn=list),
         "Strategy.distribute_datasets_from_function() has no argument dataset_fn: fn="),
        (lambda: mirrored.OneDeviceStrategy().experimental_distribute_values_from_function(value_fn=list),
         "Strategy.distribute_values_from_function() has no argument value_fn: fn="),
        (lambda: mirrored.OneDeviceStrategy().reduce(X, "sum"),
         'the operation is a Tensor, but must be a string and the first argument: reduce("sum", value)'),
        (lambda: mirrored.OneDeviceStrategy().distribute_dataset(X, batch_size=2),
         "Strategy.distribute_dataset() has no argument batch_size: global_batch_size="),
        (lambda: mirrored.CheckpointManager(mirrored.OneDeviceStrategy(), {}, "results"),
         "objects is a str, but must be a dict by name: {'model': model, …}"),
        (in_replica(lambda c: c.all_reduce(reduce_op="sum", value=1.0)),
         'ReplicaContext.all_reduce() has no argument reduce_op: all_reduce("sum", value)'),
        (in_replica(lambda c: c.all_reduce("sum", 1.0, Options())),
         "takes 2 positional arguments (op, value), but was given 3; for TensorFlow's"),
        (in_replica(lambda c: c.all_gather(torch.ones(1), 0, options=Options())), "all_gather() has no argument opti"),
        (in_replica(lambda c: c.merge_call(merge_fn=print)), "merge_call() has no argument merge_fn: fn="),
    ],
)  # fmt: skip
def test_arguments_that_are_others_or_elsewhere(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(TypeError, match=re.escape(words)):
        call()


def test_signatures_stay_what_they_are() -> None:
    assert list(inspect.signature(mirrored.Strategy.run).parameters) == ["self", "fn", "args", "kwargs"]
    strategy = inspect.signature(mirrored.MirroredStrategy)
    assert list(strategy.parameters)[:2] == ["devices", "communication"]
    assert strategy.parameters["communication"].kind is inspect.Parameter.KEYWORD_ONLY
    assert "global_batch_size" in inspect.signature(mirrored.Strategy.distribute_dataset).parameters
    assert (mirrored.Strategy.run.__doc__ or "").startswith("Calls ``fn(*args, **kwargs)``")
    with pytest.raises(TypeError, match=r"run\(\) got an unexpected keyword argument 'step'"):
        mirrored.OneDeviceStrategy().run(two_arguments, (1,), step=3)  # type: ignore[call-arg]


def train_in_two_threads(strategy: mirrored.Strategy) -> list[str]:
    """What a second thread's call of run gives while the first is inside it, and when it is not."""
    inside, done = threading.Event(), threading.Event()
    said: list[str] = []

    def step() -> None:
        inside.set()
        done.wait()

    def second() -> None:
        inside.wait()
        try:
            strategy.run(int)
        except RuntimeError as error:
            said.append(str(error))
        done.set()

    thread = threading.Thread(target=second)
    thread.start()
    strategy.run(step)
    thread.join()
    other = threading.Thread(target=lambda: said.append(str(strategy.run(int))))
    other.start()
    other.join()
    return said


@pytest.mark.parametrize("count", [1, 2])
def test_two_threads_do_not_train_at_once(count: int) -> None:
    for said in towers(train_in_two_threads, count=count):
        assert re.match(r"strategy.run was called in a thread while another thread is inside it", said[0])
        assert said[1] == "0"


def test_mirror_takes_modules() -> None:
    strategy = mirrored.OneDeviceStrategy()
    for value in (torch.nn.Linear(1, 1).state_dict(), torch.nn.Linear, None):
        with pytest.raises(TypeError, match="strategy.mirror was given a value of type .*; give it a torch module"):
            strategy.mirror(value)  # type: ignore[arg-type]
