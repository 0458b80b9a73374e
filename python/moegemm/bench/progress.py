"""How far a measurement is."""

import sys
from typing import Any


class Progress:
    """A bar on a terminal, one line per case elsewhere."""

    def __init__(self, total: int, done: int = 0) -> None:
        self._total = total
        self._done = done
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm  # only where a bar is shown

            self._bar = tqdm(total=total, initial=done, unit="case", dynamic_ncols=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def step(self, words: str) -> None:
        self._done += 1
        if self._bar is None:
            print(f"[{self._done:{len(str(self._total))}d}/{self._total}] {words}", file=sys.stderr, flush=True)
        else:
            self._bar.set_postfix_str(words, refresh=False)
            self._bar.update()
