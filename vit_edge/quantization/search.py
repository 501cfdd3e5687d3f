"""Which products to give back to float: the order to try them in, and the few that a judge cannot do without.

Pure: what a set of products does to the accuracy, `holds` tells, which raises `BudgetSpentError` when the budget is used up.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from vit_edge.quantization.sensitivity import Cost

OVERHEAD = 0.5
"""Of the time that int8 saves, what goes by the product, not by its multiply-adds: quantizing, the call, the memory."""


class BudgetSpentError(Exception):
    """No seconds or no trials are left; says which."""


def time_shares(costs: Mapping[str, Cost]) -> dict[str, float]:
    """Each product's share of the time that int8 saves, from its multiply-adds.

    A single product's part of a latency is below what a clock can tell from one session to the next, so it is reckoned;
    what a whole candidate takes is measured.
    """
    work = sum(cost.multiply_adds for cost in costs.values())
    return {name: OVERHEAD / len(costs) + (1 - OVERHEAD) * cost.multiply_adds / work for name, cost in costs.items()}


def ranked(costs: Mapping[str, Cost]) -> list[str]:
    """From the product whose int8 costs the answers most for the time that it saves, down."""
    shares = time_shares(costs)
    return sorted(costs, key=lambda name: costs[name].kl / shares[name], reverse=True)


def halfway(costs: Mapping[str, Cost], order: Sequence[str]) -> int:
    """How many products, in this order, have half of the divergence that all cause alone: where to begin looking."""
    half, so_far = sum(cost.kl for cost in costs.values()) / 2, 0.0
    for count, name in enumerate(order, 1):
        so_far += costs[name].kl
        if so_far >= half:
            return count
    return 1


def fewest(
    order: Sequence[str], shares: Mapping[str, float], holds: Callable[[Collection[str]], bool], first: int = 1
) -> list[str] | None:
    """The products to give back: none of them can be left out, by `holds`; None when not even all together hold.

    order: from the one that is given back first. Prefixes are tried, so many products in the first one and each twice as
    long as the one before, until one holds, then those between it and the last that did not. Then each of its members is
    tried in int8 again, from the one that saves most time on.
    """
    shortest = _shortest_prefix(order, holds, first)
    if shortest is None:
        return None
    kept = list(order[:shortest])
    for name in sorted(kept[:-1], key=lambda name: shares[name], reverse=True):
        without = [other for other in kept if other != name]
        if holds(without):
            kept = without
    return kept


def _shortest_prefix(order: Sequence[str], holds: Callable[[Collection[str]], bool], first: int) -> int | None:
    if holds(()):
        return 0
    failing, length = 0, min(first, max(1, len(order)))
    while not order or not holds(order[:length]):
        if length >= len(order):
            return None
        failing, length = length, min(2 * length, len(order))
    while length - failing > 1:
        middle = (failing + length) // 2
        failing, length = (failing, middle) if holds(order[:middle]) else (middle, length)
    return length
