"""The pool of worker processes: results in order, and a worker in trouble is named."""

import os
import signal
import time

import pytest

from megatron_simple.data.worker_pool import WorkerError, WorkerPool


def make_fault(kind: str):
    """A worker's handler for the pool's own tests."""

    def handle(task: int, report) -> int:
        report(1)
        if task == 1 and kind == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        if task == 1 and kind == "exit":
            os._exit(3)
        if task == 1 and kind == "ValueError":
            raise ValueError("a sentence")
        if task == 1 and kind == "bug":
            raise KeyError("surprise")
        time.sleep(0.05 if task == 0 else 0)
        return task * 10

    return handle


class TestWorkerPool:
    arguments = {"is_last": lambda result: result == 30, "describe": str}

    def test_results_in_order_and_no_task_after_the_last(self):
        done: list[int] = []
        with WorkerPool(3, make_fault, "none") as pool:
            assert list(pool.run(range(9), on_progress=done.append, **self.arguments)) == [0, 10, 20, 30]
        assert 4 <= sum(done) <= 6

    @pytest.mark.parametrize(
        ("kind", "message"),
        [
            ("signal", r"worker \d \(process \d+\) was killed by signal 9 while it worked on 1; if the machine"),
            ("exit", r"worker \d \(process \d+\) ended with exit code 3"),
            ("ValueError", r"worker \d on 1: a sentence"),
            ("bug", "KeyError: 'surprise'"),
        ],
    )
    def test_a_worker_in_trouble(self, kind, message):
        with WorkerPool(2, make_fault, kind) as pool, pytest.raises(WorkerError, match=message):
            list(pool.run(range(9), on_progress=lambda _: None, **self.arguments))
