"""Sets have no order; their text has one, which depends on the elements alone."""

import dataclasses
from enum import Enum
from typing import Annotated, Any, NamedTuple

import pytest
from pydantic import BaseModel, Field, RootModel, field_serializer
from typing_extensions import TypedDict

from horsies.codec.calls import CallSignature
from horsies.codec.canonical import canonical
from horsies.codec.results import ResultCodec
from horsies.task_result import TaskError, TaskResult
from tests.support.orders import printed_under_hash_seeds


class Shade(Enum):
    DARK = "dark"
    LIGHT = "light"
    NONE = None


class Words(RootModel[set[str]]):
    pass


class Box(BaseModel):
    words: set[str]
    hidden: set[str] = Field(default=set(), exclude=True)
    inner: "Box | None" = None


@dataclasses.dataclass(frozen=True)
class Crate:
    words: frozenset[str]


class Shelf(TypedDict):
    words: set[str]


class Record(BaseModel):
    type: str = "set"
    default: set[str] = set()
    metadata: dict[Shade, set[str]] = {}


class Couple(NamedTuple):
    words: frozenset[str]
    number: int


class Sender(BaseModel):
    words: set[str]

    @field_serializer("words")
    def _written(self, words: set[str]) -> list[str]:
        return list(words)


def signature_of(annotation: Any) -> CallSignature:
    def task(value: Any) -> None: ...

    task.__annotations__["value"] = annotation
    return CallSignature.of(task)


# Multiples of eight meet in a small table, so that the order in which they come shows.
UP, DOWN = set(range(0, 32, 8)), set(range(24, -1, -8))
WORDS = {"gamma", "alpha", "beta", "é", "delta"}
SORTED_WORDS = '["alpha","beta","delta","gamma","é"]'


@pytest.mark.parametrize(
    ("annotation", "value", "text"),
    [
        (set[str], WORDS, SORTED_WORDS),
        (frozenset[str], frozenset(WORDS), SORTED_WORDS),
        (set[str] | None, WORDS, SORTED_WORDS),
        (int | set[str], WORDS, SORTED_WORDS),
        (set[int], {16, 8, 0, 100, 24, -1}, "[-1,0,8,16,24,100]"),
        (set[float], {2.5, 1.0, 10.0}, "[1.0,10.0,2.5]"),
        (set[int | str], {"b", 2, "a", 1}, '["a","b",1,2]'),
        (set[bytes], {b"b", b"a"}, '["YQ==","Yg=="]'),
        (set[Shade], set(Shade), '["dark","light",null]'),
        (set[tuple[str, int]], {("b", 1), ("a", 2)}, '[["a",2],["b",1]]'),
        (
            set[frozenset[str]],
            {frozenset({"b", "a"}), frozenset({"c"}), frozenset()},
            '[["a","b"],["c"],[]]',
        ),
        (list[set[str]], [WORDS, {"a"}], f'[{SORTED_WORDS},["a"]]'),
        (tuple[set[str], int], (WORDS, 1), f"[{SORTED_WORDS},1]"),
        (dict[int, set[str]], {2: WORDS, 1: set()}, f'{{"2":{SORTED_WORDS},"1":[]}}'),
        (Words, Words(WORDS), SORTED_WORDS),
        (list[Words], [Words(WORDS)], f"[{SORTED_WORDS}]"),
        (Crate, Crate(frozenset(WORDS)), f'{{"words":{SORTED_WORDS}}}'),
        (set[Crate], {Crate(frozenset(WORDS))}, f'[{{"words":{SORTED_WORDS}}}]'),
        (Shelf, {"words": WORDS}, f'{{"words":{SORTED_WORDS}}}'),
        (Couple, Couple(frozenset(WORDS), 1), f"[{SORTED_WORDS},1]"),
        (
            Record,
            Record(default=WORDS),
            f'{{"type":"set","default":{SORTED_WORDS},"metadata":{{}}}}',
        ),
        (
            Record,
            Record(metadata={Shade.LIGHT: WORDS, Shade.DARK: {"b", "a"}}),
            f'{{"type":"set","default":[],"metadata":{{"light":{SORTED_WORDS},"dark":["a","b"]}}}}',
        ),
        (Sender, Sender(words=WORDS), f'{{"words":{SORTED_WORDS}}}'),
        (
            Box,
            Box(words=WORDS, inner=Box(words=WORDS)),
            f'{{"words":{SORTED_WORDS},"inner":{{"words":{SORTED_WORDS},"inner":null}}}}',
        ),
    ],
)
def test_sets_are_written_in_the_order_of_their_elements(
    annotation: Any, value: Any, text: str
) -> None:
    signature = signature_of(annotation)
    call = signature.encode_call((value,), {}).unwrap()
    assert call.args_json == f"[{text}]"
    back = signature.decode_call(call.args_json, "{}").unwrap().args[0]
    assert back == value
    assert type(back) is type(value)
    named = signature.encode_call((), {"value": value}).unwrap()
    assert named.kwargs_json == f'{{"value":{text}}}'
    result = ResultCodec.of(annotation, TaskError).encode(TaskResult(ok=value)).unwrap()
    assert result == f'{{"ok":{text}}}'


def test_the_order_in_which_a_set_was_filled_is_not_written() -> None:
    assert list(UP) != list(DOWN), "else this shows nothing"
    signature = signature_of(set[int])
    assert signature.encode_call((UP,), {}) == signature.encode_call((DOWN,), {})


def test_a_parameter_may_have_any_name_and_default() -> None:
    endless: list[Any] = []
    endless.append(endless)

    def task(
        metadata: set[str], default: Annotated[Any, Field(default=endless)] = None
    ) -> None: ...

    call = CallSignature.of(task).encode_call((WORDS,), {}).unwrap()
    assert call.args_json == f"[{SORTED_WORDS}]"
    call = CallSignature.of(task).encode_call((), {"metadata": WORDS}).unwrap()
    assert call.kwargs_json == f'{{"metadata":{SORTED_WORDS}}}'


def test_lists_and_dicts_are_written_in_their_own_order() -> None:
    signature = signature_of(tuple[list[str], dict[str, int], set[str]])
    call = signature.encode_call(((["b", "a"], {"b": 1, "a": 2}, {"b", "a"}),), {}).unwrap()
    assert call.args_json == '[[["b","a"],{"b":1,"a":2},["a","b"]]]'


SET_SCRIPT = """
from horsies.codec.calls import CallSignature

def task(words: set[str], groups: dict[str, frozenset[str]]) -> None: ...

words = {"alpha", "beta", "gamma", "delta", "epsilon"}
print(CallSignature.of(task).encode_call((words,), {"groups": {"all": frozenset(words)}}).unwrap())
"""


@pytest.mark.slow
def test_every_interpreter_writes_a_set_the_same_way() -> None:
    (printed,) = printed_under_hash_seeds(SET_SCRIPT)
    assert '["alpha","beta","delta","epsilon","gamma"]' in printed


# Canonical text


@pytest.mark.parametrize(
    ("text", "ordered"),
    [
        ("{}", "{}"),
        ("[2,1]", "[2,1]"),
        ('{"a":1}', '{"a":1}'),
        ('{"b":1,"a":2}', '{"a":2,"b":1}'),
        ('[{"b":{"d":1,"c":2},"a":[{"z":1,"y":2}]}]', '[{"a":[{"y":2,"z":1}],"b":{"c":2,"d":1}}]'),
        ('{"b":"\\"a\\":1","a":"é"}', '{"a":"é","b":"\\"a\\":1"}'),
        ('{"b":1,"a":1.0,"c":true}', '{"a":1.0,"b":1,"c":true}'),
    ],
)
def test_canonical_text_has_its_keys_in_order_and_keeps_the_rest(text: str, ordered: str) -> None:
    assert canonical(text) == ordered


def test_text_nested_too_deeply_to_be_read_is_its_own_canonical_text() -> None:
    text = '{"b":1,"a":' + "[" * 300 + "]" * 300 + "}"
    assert canonical(text) == text


def test_numbers_that_only_look_equal_stay_different() -> None:
    texts = {f'{{"a":0,"b":{one}}}' for one in ("1", "1.0", "true", '"1"', "[1]", "null")}
    assert {canonical(text) for text in texts} == texts
