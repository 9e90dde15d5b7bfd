import datetime as dt
import json
import math
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from random import Random
from typing import Any, Literal, NamedTuple, NoReturn, NotRequired

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict
from typing_extensions import TypedDict

from horsies.codec.calls import CallSignature
from horsies.codec.canonical import canonical
from horsies.codec.form import CodecError
from horsies.codec.results import ResultCodec, decode_untyped, encode_task_error
from horsies.error_codes import OperationalErrorCode
from horsies.result import Err, Ok
from horsies.task_result import TaskError, TaskResult
from tests.support.examples import examples
from tests.support.orders import reordered

SETTINGS = settings(
    max_examples=examples(80),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)


class Shade(Enum):
    DARK = "dark"
    LIGHT = 2


class Rank(IntEnum):
    FIRST = 1
    SECOND = 2


class Mood(StrEnum):
    GOOD = "good"
    BAD = "bad"


class Spot(NamedTuple):
    x: int
    label: str


class Row(TypedDict):
    amount: Decimal
    blob: NotRequired[bytes]


@dataclass(frozen=True)
class Parcel:
    id: uuid.UUID
    content: bytes
    sizes: tuple[float, ...] = ()
    tags: frozenset[str] = field(default_factory=frozenset)


class Order(BaseModel):
    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    number: int
    parcels: list[Parcel]
    spot: Spot
    row: Row
    shade: Shade
    timestamp: dt.datetime | None
    prices: dict[str, Decimal]
    anything: Any


stored_text = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]))
finite = st.floats(allow_nan=False, allow_infinity=False)
decimals = st.decimals(allow_nan=False, allow_infinity=False)
timestamps = st.datetimes() | st.datetimes(timezones=st.timezones() | st.just(dt.UTC))
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | stored_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(stored_text, inner, max_size=4),
    max_leaves=12,
)
spots = st.builds(Spot, st.integers(), stored_text)
rows = st.fixed_dictionaries({"amount": decimals}, optional={"blob": st.binary()})
parcels = st.builds(
    Parcel,
    st.uuids(),
    st.binary(),
    st.lists(finite, max_size=3).map(tuple),
    st.frozensets(stored_text, max_size=3),
)
orders = st.builds(
    Order,
    number=st.integers(),
    parcels=st.lists(parcels, max_size=3),
    spot=spots,
    row=rows,
    shade=st.sampled_from(Shade),
    timestamp=st.none() | st.datetimes(),
    prices=st.dictionaries(stored_text, decimals, max_size=3),
    anything=plain,
)

Typed = tuple[Any, st.SearchStrategy[Any]]

# Annotations made at run time are no types for the type checker.
LIST: Any = list
TUPLE: Any = tuple
DICT: Any = dict
SET: Any = set
FROZENSET: Any = frozenset

SCALARS: list[Typed] = [
    (int, st.integers() | st.integers(-(10**300), 10**300)),
    (str, stored_text),
    (float, finite),
    (bool, st.booleans()),
    (None, st.none()),
    (bytes, st.binary()),
    (uuid.UUID, st.uuids()),
    (Decimal, decimals),
    (dt.date, st.dates()),
    (dt.time, st.times()),
    (dt.timedelta, st.timedeltas(dt.timedelta(days=-9_000_000), dt.timedelta(days=9_000_000))),
    (Shade, st.sampled_from(Shade)),
    (Rank, st.sampled_from(Rank)),
    (Mood, st.sampled_from(Mood)),
    (Literal["a", 1, None], st.sampled_from(["a", 1, None])),
]
RECORDS: list[Typed] = [(Spot, spots), (Row, rows), (Parcel, parcels), (Order, orders)]
KEYS = [pair for pair in SCALARS if pair[0] in (int, str, uuid.UUID, dt.date, Mood)]
HASHABLE = [pair for pair in SCALARS if pair[0] is not None]


def list_of(typed: Typed) -> Typed:
    return LIST[typed[0]], st.lists(typed[1], max_size=4)


def tuple_of(typed: Typed) -> Typed:
    return TUPLE[typed[0], ...], st.lists(typed[1], max_size=4).map(tuple)


def pair_of(typed: Typed) -> Typed:
    return TUPLE[typed[0], int], st.tuples(typed[1], st.integers())


def optional(typed: Typed) -> Typed:
    return (None, st.none()) if typed[0] is None else (typed[0] | None, st.none() | typed[1])


def keyed(key: Typed) -> Callable[[Typed], Typed]:
    def dict_of(typed: Typed) -> Typed:
        members = st.dictionaries(key[1], typed[1], max_size=4)
        return DICT[key[0], typed[0]], members

    return dict_of


containers = st.sampled_from([list_of, tuple_of, pair_of, optional]) | st.sampled_from(KEYS).map(
    keyed
)
sets = st.sampled_from(HASHABLE).map(lambda one: (SET[one[0]], st.sets(one[1], max_size=4)))
frozensets = st.sampled_from(HASHABLE).map(
    lambda one: (FROZENSET[one[0]], st.frozensets(one[1], max_size=4))
)
typed_values = st.recursive(
    st.sampled_from(SCALARS + RECORDS) | sets | frozensets,
    lambda inner: st.builds(lambda container, typed: container(typed), containers, inner),
    max_leaves=3,
)


def signature_of(annotation: Any) -> CallSignature:
    def task(value: Any) -> None: ...

    task.__annotations__["value"] = annotation
    return CallSignature.of(task)


def never(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is not JSON")


def stored(signature: CallSignature, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """Encode, and check that what would be stored is strict JSON in UTF-8 without NUL."""
    call = signature.encode_call(args, kwargs).unwrap()
    for text in (call.args_json, call.kwargs_json):
        text.encode()
        json.loads(text, parse_constant=never)
        assert "\x00" not in text
    return call.args_json, call.kwargs_json


@SETTINGS
@given(typed_values.flatmap(lambda typed: st.tuples(st.just(typed[0]), typed[1])))
def test_every_supported_value_comes_back_as_it_was_sent(case: tuple[Any, Any]) -> None:
    annotation, value = case
    signature = signature_of(annotation)
    by_position = signature.decode_call(*stored(signature, value)).unwrap()
    by_name = signature.decode_call(*stored(signature, value=value)).unwrap()
    for back in (by_position.args[0], by_name.kwargs["value"]):
        assert back == value
        assert type(back) is type(value)


@SETTINGS
@given(typed_values.flatmap(lambda typed: st.tuples(st.just(typed[0]), typed[1])))
def test_every_supported_value_comes_back_from_a_result(case: tuple[Any, Any]) -> None:
    annotation, value = case
    codec = ResultCodec.of(annotation, TaskError)
    assert codec.decode(codec.encode(TaskResult(ok=value)).unwrap()) == Ok(TaskResult(ok=value))


@settings(SETTINGS, max_examples=examples(200))
@given(
    typed_values.flatmap(lambda typed: st.tuples(st.just(typed[0]), typed[1])),
    st.randoms(use_true_random=False),
)
def test_equal_values_filled_in_another_order_have_the_same_canonical_text(
    case: tuple[Any, Any], random: Random
) -> None:
    annotation, value = case
    signature = signature_of(annotation)
    one, two = stored(signature, value)[0], stored(signature, reordered(value, random))[0]
    assert canonical(one) == canonical(two)
    assert json.loads(canonical(one)) == json.loads(one)


@SETTINGS
@given(plain)
def test_canonical_text_keeps_every_value_and_sorts_every_object(value: Any) -> None:
    (text, _) = stored(ANYTHING, value)
    assert repr(with_sorted_keys(json.loads(text))) == repr(json.loads(canonical(text)))
    assert canonical(canonical(text)) == canonical(text)


def with_sorted_keys(value: Any) -> Any:
    match value:
        case list():
            return [with_sorted_keys(one) for one in value]
        case dict():
            return {key: with_sorted_keys(value[key]) for key in sorted(value)}
        case _:
            return value


@SETTINGS
@given(timestamps)
def test_a_timestamp_stays_the_same_instant_or_is_refused(timestamp: dt.datetime) -> None:
    signature = signature_of(dt.datetime)
    match signature.encode_call((timestamp,), {}):
        case Ok(call):
            back = signature.decode_call(call.args_json, "{}").unwrap().args[0]
            assert back.replace(tzinfo=None) == timestamp.replace(tzinfo=None)
            assert back.utcoffset() == timestamp.utcoffset()
        case Err(error):
            offset = timestamp.utcoffset()
            assert offset is not None, error
            assert offset.seconds % 60 or offset.microseconds, error


@SETTINGS
@given(
    st.one_of(st.integers(), stored_text, st.uuids(), timestamps, decimals, st.booleans(), finite),
    st.permutations([int, str, uuid.UUID, dt.datetime, Decimal, bool, float]),
)
def test_a_union_gives_the_same_member_back_or_refuses(value: Any, members: list[Any]) -> None:
    union: Any = members[0]
    for member in members[1:]:
        union = union | member
    signature = signature_of(union)
    match signature.encode_call((value,), {}):
        case Ok(call):
            back = signature.decode_call(call.args_json, "{}").unwrap().args[0]
            assert type(back) is type(value)
            assert back == value or isinstance(value, dt.datetime)
        case Err(error):
            assert error.path == "value"


class Thing:
    pass


wild = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.sampled_from(["\x00", "\ud800", "NaN", "\\u0000", "\ufffd", Thing(), Thing])
    | st.binary()
    | st.uuids()
    | st.decimals(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(0, 3), inner, max_size=3)
    ),
    max_leaves=6,
)


def is_plain(value: Any) -> bool:
    match value:
        case None | bool():
            return True
        case int():
            return abs(value) < 10**4_300
        case float():
            return math.isfinite(value)
        case str():
            return "\x00" not in value and not any("\ud800" <= one <= "\udfff" for one in value)
        case list():
            return all(is_plain(one) for one in value)
        case dict():
            keys_are_text = all(isinstance(key, str) and is_plain(key) for key in value)
            return keys_are_text and all(is_plain(one) for one in value.values())
        case _:
            return False


ANYTHING = signature_of(Any)


@settings(SETTINGS, max_examples=examples(300))
@given(wild)
def test_an_untyped_parameter_stores_plain_json_exactly_and_refuses_all_else(value: Any) -> None:
    match ANYTHING.encode_call((value,), {}):
        case Ok(_):
            assert is_plain(value)
            back = ANYTHING.decode_call(*stored(ANYTHING, value)).unwrap().args[0]
            assert back == value
        case Err(error):
            assert not is_plain(value)
            assert error.path.startswith("value")
            error.message.encode()
            error.path.encode()


@SETTINGS
@given(wild, st.sampled_from([pair[0] for pair in SCALARS + RECORDS] + [list[int], set[str]]))
def test_any_value_for_any_annotation_is_answered_without_raising(
    value: Any, annotation: Any
) -> None:
    signature = signature_of(annotation)
    match signature.encode_call((), {"value": value}):
        case Ok(call):
            assert signature.decode_call(call.args_json, call.kwargs_json).is_ok()
        case Err(error):
            assert isinstance(error, CodecError)
            assert error.path.startswith("value")


@SETTINGS
@given(wild)
def test_an_error_made_by_the_library_can_always_be_stored_and_read(data: Any) -> None:
    code = OperationalErrorCode.UNHANDLED_EXCEPTION
    text = encode_task_error(TaskError(error_code=code, message="m", data=data))
    text.encode()
    json.loads(text, parse_constant=never)
    assert decode_untyped(text).unwrap().err_value.error_code is code


HOSTILE_KEYS = [
    "__class__",
    "module",
    "qualname",
    "__reduce__",
    "__builtin_task_code__",
    "__pydantic_model__",
    "ok",
    "err",
    "error_code",
    "data",
    "number",
    "parcels",
]
hostile_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["antigravity", "TASK_TIMEOUT", "dark"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(HOSTILE_KEYS) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=10,
)
hostile_text = (
    hostile_json.map(json.dumps)
    | hostile_json.map(lambda value: json.dumps([value]))
    | hostile_json.map(lambda value: json.dumps({"err": value}))
    | hostile_json.map(lambda value: json.dumps({"ok": value}))
    | st.text(st.characters())
    | st.text('[]{}",:0123456789.eE+-\\ untrfalsNaI')
    | st.integers(1, 3_000).map(lambda depth: "[" * depth + "]" * depth)
)
SIGNATURES = [signature_of(pair[0]) for pair in SCALARS + RECORDS] + [ANYTHING]
CODECS = [ResultCodec.of(pair[0], TaskError) for pair in RECORDS] + [
    ResultCodec.of(Any, error_type) for error_type in (Any, Order, str, TaskError)
]


@settings(SETTINGS, max_examples=examples(200))
@given(hostile_text, hostile_text)
def test_reading_arbitrary_text_never_raises_and_never_imports(one: str, two: str) -> None:
    before = set(sys.modules)
    for signature in SIGNATURES:
        assert isinstance(signature.decode_call(one, two), Ok | Err)
        assert isinstance(signature.decode_call(one, "{}"), Ok | Err)
    for codec in CODECS:
        assert isinstance(codec.decode(one), Ok | Err)
    assert isinstance(decode_untyped(one), Ok | Err)
    assert set(sys.modules) == before


@SETTINGS
@given(hostile_json.filter(is_plain))
def test_stored_objects_stay_plain_data_whatever_their_keys(data: Any) -> None:
    text = json.dumps(data, ensure_ascii=False)
    assert ANYTHING.decode_call(f"[{text}]", "{}").unwrap().args == (data,)
    assert decode_untyped(f'{{"ok":{text}}}') == Ok(TaskResult(ok=data))
