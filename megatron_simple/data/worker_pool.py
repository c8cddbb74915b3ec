"""Worker processes that answer tasks in order, and a parent that notices when one of them dies."""

import contextlib
import logging
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any


class WorkerError(ValueError):
    """A worker failed or was killed; the message says which one, on what, and why."""


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    number: int
    task: int | None = None  # index of the task it works on


class WorkerPool:
    """`count` processes that each make one handler by `make_handler(*arguments)` and call handler(task, report).

    `report(amount)` adds to the progress. A context manager: leaving it ends every worker. The processes are spawned,
    so `make_handler` must be importable and tasks, results and arguments must pickle.
    """

    def __init__(self, count: int, make_handler: Callable[..., Callable[..., Any]], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        try:
            for number in range(1, count + 1):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, make_handler, arguments), daemon=True)
                process.start()
                theirs.close()  # so that the worker's death closes the pipe
                self._workers.append(_Worker(process, ours, number))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every worker at once, busy or not."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()
        self._workers = []

    def run(
        self,
        tasks: Sequence[Any],
        *,
        is_last: Callable[[Any], bool],
        on_progress: Callable[[int], None],
        describe: Callable[[Any], str],
    ) -> Iterator[Any]:
        """Results in the order of `tasks`. A result for which `is_last` holds ends them: no later task is begun, the
        earlier ones are finished. WorkerError as soon as a worker dies or its handler raises."""
        results: dict[int, Any] = {}
        end = len(tasks)
        begun = given = 0
        for worker in self._workers:
            begun += self._begin(worker, begun, tasks, end)
        while given < end:
            for connection in wait([worker.connection for worker in self._workers if worker.task is not None]):
                worker = next(worker for worker in self._workers if worker.connection is connection)
                kind, content = _receive(worker, tasks, describe)
                if kind == "progress":
                    on_progress(content)
                    continue
                results[worker.task] = content
                if is_last(content):
                    end = min(end, worker.task + 1)
                begun += self._begin(worker, begun, tasks, end)
            while given in results and given < end:
                yield results.pop(given)
                given += 1

    @staticmethod
    def _begin(worker: _Worker, index: int, tasks: Sequence[Any], end: int) -> bool:
        """Hands task `index` to `worker` if there is one left."""
        worker.task = index if index < end else None
        if worker.task is not None:
            with contextlib.suppress(BrokenPipeError):  # it is dead: the next look at its pipe says so
                worker.connection.send((tasks[index],))
        return worker.task is not None


def _receive(worker: _Worker, tasks: Sequence[Any], describe: Callable[[Any], str]) -> tuple[str, Any]:
    try:
        kind, content = worker.connection.recv()
    except (EOFError, OSError):
        worker.process.join(timeout=5)
        code = worker.process.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        raise WorkerError(
            f"worker {worker.number} (process {worker.process.pid}) {how} while it worked on "
            f"{describe(tasks[worker.task])}; if the machine ran out of memory, use fewer --workers"
        ) from None
    if kind == "error":
        raise WorkerError(f"worker {worker.number} on {describe(tasks[worker.task])}: {content}")
    return kind, content


def _serve(connection: Connection, make_handler: Callable[..., Callable[..., Any]], arguments: tuple) -> None:
    """A worker's life: until the parent ends it or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent alone acts on it
    logging.disable(logging.WARNING)  # the parent has said it once

    def report(amount: int) -> None:
        connection.send(("progress", amount))

    handler = None
    try:
        while True:
            (task,) = connection.recv()
            try:
                handler = handler or make_handler(*arguments)
                answer = ("result", handler(task, report))
            except (BrokenPipeError, EOFError):
                return
            except (ValueError, OSError) as error:
                answer = ("error", str(error))
            except Exception:  # noqa: BLE001  a fault of ours: the parent must see it, not wait for ever
                answer = ("error", traceback.format_exc())
            connection.send(answer)
    except (BrokenPipeError, ConnectionResetError, EOFError):
        return  # the parent is gone
