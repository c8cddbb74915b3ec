"""One progress display: a bar on a terminal, a plain line every few seconds elsewhere."""

import sys
import time

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Counts bytes up to `total` on stderr; a context manager."""

    def __init__(self, what: str, *, total: int) -> None:
        self._what = what
        self._total = total
        self._done = 0
        self._started = self._printed = time.monotonic()
        on_terminal = sys.stderr.isatty()
        self._bar = tqdm(total=total, desc=what, unit="B", unit_scale=True) if on_terminal else None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, amount: int) -> None:
        """`amount` more bytes are done."""
        self._done += amount
        if self._bar is not None:
            self._bar.update(amount)
            return
        now = time.monotonic()
        if now - self._printed >= _SECONDS_BETWEEN_LINES:
            self._printed = now
            speed = self._done / (now - self._started) / 1e6
            done, total = self._done / 1e6, self._total / 1e6
            print(f"{self._what}: {done:.1f} of {total:.1f} MB, {speed:.2f} MB/s", file=sys.stderr, flush=True)
