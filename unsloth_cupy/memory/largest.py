"""The largest batch or row whose plan fits."""

from collections.abc import Callable


class Largest:
    """Finds the largest number whose plan fits; caches plans for later searches."""

    def __init__(self, plan: Callable[[int], int], step: int = 1, most: int | None = None) -> None:
        self.plan, self.step, self.most = plan, step, None if most is None else most // step
        self.known = {0: 0}  # bytes of the plan for each multiple of step

    def total(self, number: int) -> int:
        """Return the bytes of the plan for ``number * step``."""
        if number not in self.known:
            self.known[number] = self.plan(number * self.step)
        return self.known[number]

    def __call__(self, limit: int) -> int:
        """Return the largest multiple of ``step`` that fits into ``limit`` bytes, or 0.

        Bytes grow nearly linearly: each guess is where the line through two plans reaches the
        limit.  A guess that fits is the answer if the next number does not fit on that line.
        """
        if self.total(1) > limit:
            return 0
        if self.most is not None and self.total(self.most) <= limit:
            return self.most * self.step
        below = max(n for n, size in self.known.items() if size <= limit)
        while True:
            above = min((n for n, size in self.known.items() if size > limit), default=2 * below)
            slope = (self.total(above) - self.total(below)) / (above - below)
            if above - below == 1 and self.total(above) > limit:
                return below * self.step
            guess = below + int((limit - self.total(below)) / slope)
            guess = min(max(guess, below + 1), above - 1) if self.total(above) > limit else guess
            if self.total(guess) <= limit:
                below = guess
                if self.total(guess) + slope > limit:
                    return below * self.step
