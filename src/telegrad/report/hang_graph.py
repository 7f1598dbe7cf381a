"""Who waits for whom, followed to the end: the ranks that others wait for and that wait for nobody, and the circles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def ends_of(waits: Mapping[int, Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """The roots of the wait graph (they wait for nobody; who is no key does not wait), and its circles: the groups
    that wait for nobody outside, each as one circle of ranks, from its lowest rank, each waiting for the next.
    """
    nodes = sorted({*waits, *(rank for to in waits.values() for rank in to)})
    components = _components(nodes, waits)
    number = {rank: at for at, component in enumerate(components) for rank in component}
    roots: list[int] = []
    circles: list[list[int]] = []
    for at, component in enumerate(components):
        inside = set(component)
        if any(number[to] != at for rank in component for to in waits.get(rank, ())):
            continue
        if len(component) == 1 and component[0] not in waits.get(component[0], ()):
            roots.append(component[0])
        else:
            circles.append(_circle(min(component), waits, inside))
    return sorted(roots), sorted(circles)


def _components(nodes: Sequence[int], waits: Mapping[int, Sequence[int]]) -> list[list[int]]:
    """Strongly connected components (Tarjan), with a stack of our own: a chain may be as long as the job is wide."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: list[list[int]] = []
    for start in nodes:
        if start in index:
            continue
        path = [(start, iter(waits.get(start, ())))]
        index[start] = low[start] = len(index)
        stack.append(start)
        on_stack.add(start)
        while path:
            rank, successors = path[-1]
            for to in successors:
                if to not in index:
                    index[to] = low[to] = len(index)
                    stack.append(to)
                    on_stack.add(to)
                    path.append((to, iter(waits.get(to, ()))))
                    break
                if to in on_stack:
                    low[rank] = min(low[rank], index[to])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[rank])
                if low[rank] == index[rank]:
                    cut = stack.index(rank)
                    found.append(stack[cut:])
                    on_stack.difference_update(stack[cut:])
                    del stack[cut:]
    return found


def _circle(start: int, waits: Mapping[int, Sequence[int]], inside: set[int]) -> list[int]:
    """A shortest circle through ``start``, whose component is ``inside``."""
    before: dict[int, int] = {}
    wave = [start]
    while wave:
        following: list[int] = []
        for rank in wave:
            for to in waits.get(rank, ()):
                if to == start:
                    path = [rank]
                    while path[-1] != start:
                        path.append(before[path[-1]])
                    return path[::-1]
                if to in inside and to not in before:
                    before[to] = rank
                    following.append(to)
        wave = following
    return [start]
