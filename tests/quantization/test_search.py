"""The few products that a judge cannot do without, found in few trials; judges here are made up."""

from collections.abc import Collection

import pytest

from vit_edge.quantization import search
from vit_edge.quantization.search import BudgetSpentError
from vit_edge.quantization.sensitivity import Cost

NAMES = [f"layer{i}" for i in range(48)]
EQUAL = dict.fromkeys(NAMES, 1 / 48)


class Judge:
    """Holds when all that is needed is given back; counts how often it is asked; held: the fewest that held."""

    def __init__(self, *needed: str, most: int = 1000):
        self.needed, self.most, self.asked = set(needed), most, 0
        self.held: set[str] = set()

    def __call__(self, given_back: Collection[str]) -> bool:
        if self.asked == self.most:
            raise BudgetSpentError("no trials are left")
        self.asked += 1
        holds = self.needed <= set(given_back)
        if holds and (not self.held or len(given_back) < len(self.held)):
            self.held = set(given_back)
        return holds


@pytest.mark.parametrize("needed", [(), ("layer0",), ("layer0", "layer1"), ("layer0", "layer5"), ("layer47",)])
def test_finds_what_is_needed_and_nothing_else(needed: tuple[str, ...]) -> None:
    assert search.fewest(NAMES, EQUAL, Judge(*needed)) == list(needed)


def test_few_that_come_first_take_few_trials() -> None:
    judge = Judge("layer0", "layer1", "layer2")
    assert search.fewest(NAMES, EQUAL, judge) == ["layer0", "layer1", "layer2"]
    assert judge.asked <= 8


def test_many_small_costs_take_few_trials() -> None:
    """As in MobileNetV3, where no product stands out: half of them are tried at once."""
    costs = {name: Cost(1.0, 100) for name in NAMES}
    first = search.halfway(costs, NAMES)
    judge = Judge(*NAMES[:20], most=7)
    with pytest.raises(BudgetSpentError):
        search.fewest(NAMES, EQUAL, judge, first)
    assert first == 24
    assert len(judge.held) == 20, "found before its members are tried one by one"


def test_the_first_prefix_has_half_of_the_divergence() -> None:
    costs = {"a": Cost(0.9, 100), "b": Cost(0.05, 100), "c": Cost(0.05, 100)}
    assert search.halfway(costs, ["a", "b", "c"]) == 1
    assert search.halfway(costs, ["b", "c", "a"]) == 3
    assert search.halfway({}, []) == 1
    assert search.halfway({"a": Cost(0, 100)}, ["a"]) == 1


@pytest.mark.parametrize("first", [1, 2, 7, 48, 100])
def test_where_it_begins_does_not_change_what_is_found(first: int) -> None:
    assert search.fewest(NAMES, EQUAL, Judge("layer0", "layer5"), first) == ["layer0", "layer5"]


def test_what_saves_most_time_is_tried_in_int8_first() -> None:
    """Either of two will do, with a third: the one that is kept is the one that costs less time."""
    shares = {"a": 0.6, "b": 0.1, "c": 0.3}

    def holds(given_back: Collection[str]) -> bool:
        return "c" in given_back and bool({"a", "b"} & set(given_back))

    assert search.fewest(["a", "b", "c"], shares, holds) == ["b", "c"]


def test_none_where_not_even_all_together_hold() -> None:
    assert search.fewest(NAMES, EQUAL, Judge("no such layer")) is None
    assert search.fewest([], {}, Judge("no such layer")) is None


def test_a_spent_budget_reaches_the_caller() -> None:
    with pytest.raises(BudgetSpentError):
        search.fewest(NAMES, EQUAL, Judge("layer40", most=3))


def test_the_order_weighs_the_divergence_against_the_time() -> None:
    costs = {"large": Cost(0.2, 900), "small": Cost(0.1, 50), "harmless": Cost(0.0, 50)}
    assert search.ranked(costs) == ["small", "large", "harmless"]
    assert sum(search.time_shares(costs).values()) == pytest.approx(1)
