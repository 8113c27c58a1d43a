"""Keeps readings of counters: every few seconds for an hour, every minute for a day. Pure: no clock."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MAX_POINTS = 300
"""Maximum of points per series."""

FINE_S, FINE_COUNT = 2.0, 3700
"""Interval of readings; they may come twice as often while a page is open, so they cover an hour at least."""
COARSE_S, COARSE_COUNT = 60.0, 1500
FINE_WINDOW_S = 3600.0


@dataclass(frozen=True, eq=False)
class Window:
    """N steps of `step_s` seconds from `start`; `values` are the counters at their bounds, float64 `[N+1, W]`.

    `times` are the bounds, float64 `[N+1]`, as far as there are readings: a step without any has no length.
    """

    start: float
    step_s: float
    times: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.times) - 1

    def increases(self) -> np.ndarray:
        """Returns the growth of each counter in each step, float64 `[N, W]`."""
        return np.diff(self.values, axis=0)

    def seconds(self) -> np.ndarray:
        """Returns the seconds of each step that readings cover, float64 `[N, 1]`; NaN without readings."""
        seconds = np.diff(self.times)[:, None]
        return np.where(seconds > 0, seconds, np.nan)


class Ring:
    """The last `count` readings of `width` counters."""

    def __init__(self, count: int, width: int) -> None:
        self._times = np.zeros(count)
        self._values = np.zeros((count, width))
        self._num_added = 0

    def __len__(self) -> int:
        return min(self._num_added, len(self._times))

    def add(self, time: float, values: np.ndarray, *, replaces_last: bool = False) -> None:
        """Adds a reading, later than all others; evicts the oldest if full."""
        self._num_added -= replaces_last
        i = self._num_added % len(self._times)
        self._times[i], self._values[i] = time, values
        self._num_added += 1

    @property
    def last(self) -> float:
        """Returns the time of the last reading, 0 without one."""
        return self._time(1)

    @property
    def last_but_one(self) -> float:
        """Returns the time of the last but one reading, 0 without one."""
        return self._time(2)

    def at(self, bounds: np.ndarray, columns: slice = slice(None)) -> tuple[np.ndarray, np.ndarray]:
        """Clips the times to the readings; returns them and the counters, interpolated between readings.

        There must be one; the counters are those of the `columns`.
        """
        order = np.arange(self._num_added - len(self), self._num_added) % len(self._times)
        times = self._times[order]
        bounds = np.clip(bounds, times[0], times[-1])
        if len(times) == 1:
            return bounds, np.repeat(self._values[order, columns], len(bounds), axis=0)
        after = np.clip(np.searchsorted(times, bounds, "right"), 1, len(times) - 1)
        share = ((bounds - times[after - 1]) / (times[after] - times[after - 1]))[:, None]
        before_values, after_values = self._values[order[after - 1], columns], self._values[order[after], columns]
        return bounds, before_values + share * (after_values - before_values)

    def _time(self, back: int) -> float:
        return float(self._times[(self._num_added - back) % len(self._times)]) if self._num_added >= back else 0.0


class Recent:
    """Readings of `width` counters over a day."""

    def __init__(self, width: int) -> None:
        self._fine = Ring(FINE_COUNT, width)
        self._coarse = Ring(COARSE_COUNT, width)

    @property
    def last(self) -> float:
        """Returns the time of the last reading, 0 without one."""
        return self._fine.last

    def add(self, time: float, values: np.ndarray) -> None:
        """Adds a reading, float64 `[W]`, if it is later than the last."""
        if len(self._fine) and time <= self._fine.last:
            return
        self._fine.add(time, values)
        replaces = time - self._coarse.last_but_one < COARSE_S  # so that the last one is always there
        self._coarse.add(time, values, replaces_last=replaces)

    def window(self, window_s: float, columns: slice = slice(None)) -> Window:
        """Returns the last seconds in at most MAX_POINTS steps; the last step may be incomplete.

        There must be a reading; the counters are those of the `columns`.
        """
        ring, step_s, bounds = self._steps(window_s)
        return Window(float(bounds[0]), step_s, *ring.at(bounds, columns))

    def whole(self, window_s: float) -> Window:
        """Returns `window` as one step."""
        ring, _, bounds = self._steps(window_s)
        ends = bounds[[0, -1]]
        return Window(float(ends[0]), float(ends[1] - ends[0]), *ring.at(ends))

    def _steps(self, window_s: float) -> tuple[Ring, float, np.ndarray]:
        is_fine = window_s <= FINE_WINDOW_S
        ring, unit_s = (self._fine, FINE_S) if is_fine else (self._coarse, COARSE_S)
        step_s = unit_s * max(1, int(np.ceil(window_s / MAX_POINTS / unit_s)))
        count = max(1, int(np.ceil(window_s / step_s)))
        end = np.ceil(self._fine.last / step_s) * step_s
        return ring, step_s, end - step_s * np.arange(count, -1, -1)
