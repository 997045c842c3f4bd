"""Equal-count number partitioning: groups of the same size whose sums are close."""

import heapq
from collections.abc import Sequence


def balanced_groups(costs: Sequence[int], group_count: int) -> list[list[int]]:
    """Returns `group_count` groups of equally many indices into `costs`, their sums close, the heaviest group first.

    The differencing method of Karmarkar and Karp (1982) in its balanced form (BLDM, Yakir 1996): the sorted costs are
    cut into sets of `group_count` neighbours, one for each group; again and again the two sets whose sums are furthest
    apart are merged, the heaviest of one with the lightest of the other. No merge widens a spread, so the groups differ
    by no more than the widest of the first sets does, and the heaviest is at most `2 - 1 / group_count` times the best
    possible. Indices rise within a group.

    Args:
        costs: one for each item; their number is a multiple of `group_count`.
        group_count: of the result, at least 1.
    """
    by_cost = sorted(range(len(costs)), key=costs.__getitem__)
    first_sets = []
    for start in range(0, len(by_cost), group_count):
        neighbours = by_cost[start : start + group_count]
        first_sets.append([(costs[index], [index]) for index in reversed(neighbours)])
    if not first_sets:
        return [[] for _ in range(group_count)]
    # The second entry decides between equal spreads, so that every rank merges in the same order.
    heap = [(_negative_spread(groups), order, groups) for order, groups in enumerate(first_sets)]
    heapq.heapify(heap)
    for order in range(len(first_sets), 2 * len(first_sets) - 1):
        _, _, wide = heapq.heappop(heap)
        _, _, narrow = heapq.heappop(heap)
        merged = [
            (heavy_sum + light_sum, heavy + light)
            for (heavy_sum, heavy), (light_sum, light) in zip(wide, reversed(narrow), strict=True)
        ]
        merged.sort(key=lambda group: -group[0])
        heapq.heappush(heap, (_negative_spread(merged), order, merged))
    return [sorted(indices) for _, indices in heap[0][2]]


def _negative_spread(groups: list[tuple[int, list[int]]]) -> int:
    """Returns lightest minus heaviest of sums in falling order: a heap gives its smallest entry first."""
    return groups[-1][0] - groups[0][0]
