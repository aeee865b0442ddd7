"""The average of every two values of a key: the first program of Flink's "Working with State".

    python examples/count_window_average.py

Each key has one value state, a pair of count and sum. The second value makes the average and clears the state. The
harness runs the function as a streaming query would; for the query see docs/start/first-query.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import statebackend as sb
from statebackend.testing import Harness

ROWS = [(1, 3), (1, 5), (1, 7), (1, 4), (1, 2)]


class CountWindowAverage(sb.KeyedProcessFunction):
    """A function over rows (key, value)."""

    def open(self, ctx: sb.FunctionContext) -> None:
        # One handle serves all keys: it works on the current key.
        self.sum = ctx.get_value_state(sb.ValueStateDescriptor("average", tuple[int, int]))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[tuple[int, int]]:
        key, value = row
        count, total = self.sum.value() or (0, 0)
        count, total = count + 1, total + value
        self.sum.update((count, total))
        if count >= 2:
            yield key, total // count
            self.sum.clear()


def main() -> None:
    with Harness(CountWindowAverage(), key="key") as harness:
        print("Every two values of a key make one average; then its state is cleared.\n")
        print("row (key, value)   output (key, average)")
        for row in ROWS:
            key, value = row
            out = harness.process_element({"key": key, "value": value})
            print(f"{row!s:<18} {out[0] if out else ''}".rstrip())
        left = list(harness.keyed.keys("average"))
        print(f"\nOne value waits for its second: keys with state are {left}.")


if __name__ == "__main__":
    main()
