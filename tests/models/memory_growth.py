"""Does a process keep something of every step it makes?"""

from collections.abc import Callable

from workbench.runtime.memory import read_memory


def least_growth(step: Callable[[], object], *, rounds: int = 4, steps: int = 250) -> int:
    """Return the bytes by which the resident set grows in the round in which it grows least.

    What is kept of each step grows in every round; an allocator that takes a few pages more now and then does not.
    """
    found = []
    for _ in range(rounds):
        before = read_memory().rss_bytes
        for _ in range(steps):
            step()
        found.append(read_memory().rss_bytes - before)
    return min(found)
