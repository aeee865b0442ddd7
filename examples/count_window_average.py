"""The average of every two values of a key: the first program of Flink's "Working with State".

    python examples/count_window_average.py

Each key has one value state, a pair of count and sum. The second value makes the average and clears the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import statebackend as sb

ROWS = [(1, 3), (1, 5), (1, 7), (1, 4), (1, 2)]


class CountWindowAverage:
    """A function over rows (key, value)."""

    def __init__(self, keyed: sb.KeyedStateBackend) -> None:
        self._keyed = keyed
        # One handle serves all keys: it works on the backend's current key.
        self.sum = keyed.get_value_state(sb.ValueStateDescriptor("average", tuple[int, int]))

    def flat_map(self, row: tuple[int, int]) -> Iterator[tuple[int, int]]:
        key, value = row
        self._keyed.set_current_key(key)
        count, total = self.sum.value() or (0, 0)
        count, total = count + 1, total + value
        self.sum.update((count, total))
        if count >= 2:
            yield key, total // count
            self.sum.clear()

    def run(self, rows: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        return [out for row in rows for out in self.flat_map(row)]


def main() -> None:
    with sb.create_backend("heap").create_keyed_backend("bigint") as keyed:
        average = CountWindowAverage(keyed)
        print("Every two values of a key make one average; then its state is cleared.\n")
        print("row (key, value)   state (count, sum)   output (key, average)")
        for row in ROWS:
            out = list(average.flat_map(row))
            state = average.sum.value()
            print(f"{row!s:<18} {'none' if state is None else state!s:<20} {out[0] if out else ''}".rstrip())
        left = list(keyed.keys("average"))
        print(f"\nOne value waits for its second: keys with state are {left}.")


if __name__ == "__main__":
    main()
