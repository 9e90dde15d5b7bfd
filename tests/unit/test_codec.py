import dataclasses
import datetime as dt
import json
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Annotated, Any, NamedTuple
from zoneinfo import ZoneInfo

import pytest
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    computed_field,
    field_serializer,
    field_validator,
    model_serializer,
)
from pydantic_core import PydanticKnownError
from typing_extensions import TypedDict

from horsies.codec.calls import BoundCall, CallSignature, EncodedCall, payload_bytes
from horsies.codec.form import CodecError, TypeMismatch
from horsies.codec.results import ResultCodec, decode_untyped, encode_task_error
from horsies.error_codes import ContractCode, OperationalErrorCode, OutcomeCode
from horsies.result import Err, Ok
from horsies.task_result import SubWorkflowError, TaskError, TaskResult

NAN = float("nan")
INFINITY = float("inf")


class Item(BaseModel):
    name: str
    price: float
    tags: list[str] = []


class SpecialItem(Item):
    discount: float = 0.5


class Holder(BaseModel):
    content: Any = None


class Node(BaseModel):
    child: "Node | None" = None


@dataclasses.dataclass
class Blob:
    data: bytes
    weight: float = 1.0


class Entry(TypedDict):
    data: bytes


class Pair(NamedTuple):
    data: bytes
    number: int


class Level(Enum):
    LOW = 1
    ALSO_LOW_AS_TEXT = "1"


class Color(IntEnum):
    RED = 1


def add(a: int, b: int) -> None: ...
def scale(factor: float) -> None: ...
def untyped(value) -> None: ...  # type: ignore[no-untyped-def]
def anything(value: Any) -> None: ...
def buy(items: list[Item], note: str = "") -> None: ...
def nothing() -> None: ...


def encoded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> EncodedCall:
    match CallSignature.of(function).encode_call(args, kwargs):
        case Ok(call):
            return call
        case Err(error):
            pytest.fail(error.message)


def refused(function: Callable[..., Any], *args: Any, **kwargs: Any) -> CodecError:
    match CallSignature.of(function).encode_call(args, kwargs):
        case Ok(call):
            pytest.fail(f"stored as {call}")
        case Err(error):
            return error


def returned(function: Callable[..., Any], *args: Any, **kwargs: Any) -> BoundCall:
    call = encoded(function, *args, **kwargs)
    json.loads(call.args_json), json.loads(call.kwargs_json)
    return decoded(function, call.args_json, call.kwargs_json)


def decoded(function: Callable[..., Any], args_json: str, kwargs_json: str = "{}") -> BoundCall:
    match CallSignature.of(function).decode_call(args_json, kwargs_json):
        case Ok(call):
            return call
        case Err(error):
            pytest.fail(error.message)


def unreadable(function: Callable[..., Any], args_json: str, kwargs_json: str = "{}") -> CodecError:
    match CallSignature.of(function).decode_call(args_json, kwargs_json):
        case Ok(call):
            pytest.fail(f"read as {call}")
        case Err(error):
            return error


def comes_back(annotation: Any, value: Any) -> Any:
    """Send one value through a parameter with that annotation and return what a child would get."""

    def task(value: Any) -> None: ...

    task.__annotations__["value"] = annotation
    return returned(task, value).args[0]


def is_refused(annotation: Any, value: Any) -> CodecError:
    def task(value: Any) -> None: ...

    task.__annotations__["value"] = annotation
    return refused(task, value)


def test_a_call_without_arguments_is_two_empty_constants() -> None:
    assert encoded(nothing) == EncodedCall("[]", "{}")
    assert decoded(nothing, "[]") == BoundCall((), {})


def test_positional_arguments_stay_positional_and_keywords_stay_keywords() -> None:
    assert encoded(add, 1, b=2) == EncodedCall("[1]", '{"b":2}')
    assert returned(add, 1, b=2) == BoundCall((1,), {"b": 2})


def test_defaults_that_were_not_passed_are_not_stored() -> None:
    assert encoded(buy, []) == EncodedCall("[[]]", "{}")
    assert decoded(buy, "[[]]") == BoundCall(([],), {})


def test_keyword_text_follows_the_signature_and_not_the_call() -> None:
    assert encoded(add, b=2, a=1) == encoded(add, a=1, b=2)


@pytest.mark.parametrize(
    ("args", "kwargs", "path", "fault"),
    [
        ((1,), {}, "b", "argument 'b' is missing"),
        ((), {"b": 1}, "a", "argument 'a' is missing"),
        ((1, 2, 3), {}, "", "3 positional arguments are too many"),
        ((1, 2), {"c": 3}, "c", "there is no parameter 'c'"),
        ((1, 2), {"b": 3}, "b", "argument 'b' is given twice"),
    ],
)
def test_a_wrong_call_names_the_fault_and_lists_the_parameters(
    args: tuple[Any, ...], kwargs: dict[str, Any], path: str, fault: str
) -> None:
    error = refused(add, *args, **kwargs)
    assert error.path == path
    assert fault in error.message
    assert error.message.endswith("the parameters are a, b.")


def test_every_kind_of_parameter_is_carried() -> None:
    def task(a: int, /, b: str, *rest: float, c: bool, **more: bytes) -> None: ...

    call = returned(task, 1, "x", 2, 3.5, c=True, a=b"\xff", z=b"")
    assert call == BoundCall((1, "x", 2.0, 3.5), {"c": True, "a": b"\xff", "z": b""})
    assert refused(task, 1, "x", 2.0, "no", c=True).path == "rest[1]"
    assert refused(task, 1, "x", c=True, z="no").path == "more.z"
    assert refused(task, 1, "x").path == "c"
    assert "a, b, *rest, c, **more" in refused(task, b="x", c=True).message


def test_a_positional_only_parameter_cannot_be_given_by_name() -> None:
    def task(a: int, /) -> None: ...

    assert refused(task, a=1).path == "a"


def test_an_argument_name_that_is_not_text_is_refused() -> None:
    def task(**more: int) -> None: ...

    names: Any = {1: 2}
    assert CallSignature.of(task).encode_call((), names).is_err()


def test_leaving_out_middle_positions_by_naming_later_ones_works() -> None:
    def task(a: int = 0, b: int = 0, *, c: int = 0) -> None: ...

    assert returned(task, c=3) == BoundCall((), {"c": 3})
    assert returned(task, 1, c=3) == BoundCall((1,), {"c": 3})


def test_a_default_in_the_annotation_is_not_filled_in() -> None:
    def task(a: Annotated[int, Field(default=7)] = 7, *, b: int = 1) -> None: ...

    assert returned(task, b=2) == BoundCall((), {"b": 2})


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (int, "5"),
        (int, 5.0),
        (int, True),
        (float, "1.5"),
        (float, True),
        (str, 5),
        (str, b"x"),
        (bool, 1),
        (bytes, "x"),
        (list[int], (1,)),
        (tuple[int, ...], [1]),
        (set[int], [1]),
        (uuid.UUID, "12345678-1234-5678-1234-567812345678"),
        (dt.datetime, "2020-01-01T00:00:00"),
        (dt.date, dt.datetime(2020, 1, 1)),
        (Decimal, "1.5"),
        (Level, 1),
        (Item, {"name": "a", "price": 1.0}),
        (Blob, {"data": b""}),
        (Pair, [b"", 1]),
        (None, 0),
    ],
)
def test_nothing_is_converted_when_sending(annotation: Any, value: Any) -> None:
    assert is_refused(annotation, value).path == "value"


def test_an_integer_is_accepted_for_a_float() -> None:
    assert comes_back(float, 3) == 3.0
    assert isinstance(comes_back(float, 3), float)


def test_an_integer_that_a_float_cannot_hold_is_refused() -> None:
    assert comes_back(list[float], [2**53, 1]) == [2**53, 1]
    error = is_refused(list[float], [1.0, 2**53 + 1])
    assert error.path == "value[1]"
    assert "exactly" in error.message
    assert is_refused(float, 10**400).path == "value"
    codec = ResultCodec.of(float | None, TaskError)
    assert result_error(codec, TaskResult(ok=2**53 + 1)).path == "ok"


def test_constraints_of_the_annotation_hold_when_sending() -> None:
    assert comes_back(Annotated[int, Field(gt=0)], 1) == 1
    error = is_refused(Annotated[int, Field(gt=0)], 0)
    assert "greater than 0" in error.message


def test_the_path_leads_to_the_wrong_value() -> None:
    items = [Item(name="a", price=1.0)] * 3
    wrong: list[Any] = [*items, "no item"]
    assert refused(buy, wrong).path == "items[3]"
    assert is_refused(dict[str, list[int]], {"a": [1, "x"]}).path == "value.a[1]"
    assert is_refused(dict[str, int], {"two words": "x"}).path == "value['two words']"
    assert refused(buy, [], note=3).path == "note"


def test_a_model_given_as_a_dict_anywhere_inside_is_refused() -> None:
    raw = {"name": "a", "price": 1.0}
    error = is_refused(dict[str, list[Item]], {"a": [Item(name="a", price=1.0), raw]})
    assert error.path == "value.a[1]"
    assert "Item" in error.message
    assert is_refused(Item | int, raw).path == "value"
    assert result_error(ResultCodec.of(Item, TaskError), TaskResult(ok=raw)).path == "ok"


def test_an_annotation_that_normalises_may_do_so() -> None:
    lower = Annotated[str, AfterValidator(str.lower)]
    assert comes_back(lower, "ABC") == "abc"
    assert comes_back(list[lower], ["ABC"]) == ["abc"]


def test_the_path_names_no_union_member_that_is_not_in_the_value() -> None:
    assert is_refused(list[int | str], [1, 2.5]).path == "value[1]"


def test_a_validator_that_calls_the_whole_value_missing_is_an_ordinary_refusal() -> None:
    def refuse(_value: object) -> None:
        raise PydanticKnownError("missing")

    codec = ResultCodec.of(Annotated[int, BeforeValidator(refuse)], TaskError)
    problem = codec.encode(TaskResult(ok=1)).unwrap_err()
    assert problem.path == "ok"
    assert "a validator refused it" in problem.message


def test_a_message_never_shows_the_value() -> None:
    class Guarded(BaseModel):
        number: int

        @field_validator("number")
        @classmethod
        def never_13(cls, number: int) -> int:
            if number == 13:
                raise ValueError(f"refused {number}")
            return number

    def task(value: Guarded) -> None: ...

    task.__annotations__["value"] = Guarded
    error = unreadable(task, '[{"number": 13}]')
    assert error.path == "value.number"
    assert "13" not in error.message
    assert "SECRET" not in is_refused(int, "SECRET").message
    assert "SECRET" not in is_refused(Holder, Holder(content=SecretStr("SECRET"))).message
    assert "SECRET" not in unreadable(task, '[{"number": "SECRET"}]').message


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (bytes, b"\xff\x00\xfe"),
        (list[bytes], [b"\xff"]),
        (Blob, Blob(b"\xff")),
        (Entry, {"data": b"\xff"}),
        (Pair, Pair(b"\xff", 3)),
        (dict[int, str], {1: "a", -2: "b"}),
        (dict[uuid.UUID, int], {uuid.UUID(int=5): 1}),
        (dict[dt.date, int], {dt.date(2020, 1, 1): 1}),
        (Level, Level.ALSO_LOW_AS_TEXT),
        (Decimal, Decimal("1.10")),
        (dt.timedelta, dt.timedelta(days=-3, microseconds=1)),
        (Sequence[int], [1, 2]),
        (Mapping[str, int], {"a": 1}),
        (object, {"a": [1, None]}),
        (int | None, None),
        (Node, Node(child=Node(child=Node()))),
        (list[Any], [1, "a", None, {"b": [True]}]),
        (int, 10**4_299),
        (str, "a \\u0000 that is only text, ü, 🐎, \u2028"),
    ],
)
def test_a_value_comes_back_as_it_was_sent(annotation: Any, value: Any) -> None:
    back = comes_back(annotation, value)
    assert back == value
    assert type(back) is type(value)


def test_bytes_in_a_model_follow_the_model_and_the_refusal_says_how() -> None:
    class Plain(BaseModel):
        data: bytes

    class Encoded(BaseModel):
        model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
        data: bytes

    assert comes_back(Encoded, Encoded(data=b"\xff")).data == b"\xff"
    assert comes_back(Plain, Plain(data=b"text")).data == b"text"
    error = is_refused(list[Plain], [Plain(data=b"text"), Plain(data=b"\xff")])
    assert error.path == "value[1].data"
    assert "base64" in error.message


def test_aliases_need_not_agree_between_writing_and_reading() -> None:
    class Aliased(BaseModel):
        one: int = Field(alias="ONE")
        two: int = Field(validation_alias="TWO")
        three: int = Field(serialization_alias="THREE")

    value = Aliased.model_validate({"ONE": 1, "TWO": 2, "three": 3})
    assert comes_back(Aliased, value) == value


def test_computed_excluded_and_private_fields_do_not_get_in_the_way() -> None:
    class Rich(BaseModel):
        model_config = ConfigDict(extra="forbid")
        size: int
        cache: int = Field(default=0, exclude=True)
        _seen: int = PrivateAttr(default=0)

        @computed_field  # type: ignore[prop-decorator]
        @property
        def double(self) -> int:
            return 2 * self.size

    value = Rich(size=2, cache=5)
    value._seen = 9
    assert comes_back(Rich, value) == Rich(size=2)


def test_a_required_field_that_is_excluded_is_refused_by_the_producer() -> None:
    class Broken(BaseModel):
        size: int = Field(exclude=True)

    error = is_refused(Broken, Broken(size=1))
    assert error.path == "value.size"
    assert "read back" in error.message


def test_objects_that_compare_by_identity_are_carried() -> None:
    @dataclasses.dataclass(eq=False)
    class Point:
        x: int

    back = comes_back(list[Point], [Point(1), Point(2)])
    assert [point.x for point in back] == [1, 2]


def test_a_time_that_exists_twice_is_carried() -> None:
    for fold in (0, 1):
        timestamp = dt.datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=fold)
        back = comes_back(dt.datetime, timestamp)
        assert back.astimezone(dt.UTC) == timestamp.astimezone(dt.UTC)


def test_a_subclass_that_would_lose_fields_is_refused() -> None:
    error = is_refused(list[Item], [SpecialItem(name="a", price=1.0)])
    assert error.path == "value[0]"
    assert "SpecialItem" in error.message
    assert "come back as Item" in error.message


@pytest.mark.parametrize(
    ("annotation", "value", "path"),
    [
        (Entry, {"data": b"", "size": 1}, "value.size"),
        (list[Entry | None], [None, {"data": b"", "size": 1}], "value[1].size"),
        (dict[str, Entry], {"a": {"data": b"", "size": 1}}, "value.a.size"),
    ],
)
def test_a_key_that_a_typed_dict_would_drop_is_refused(
    annotation: Any, value: Any, path: str
) -> None:
    error = is_refused(annotation, value)
    assert error.path == path
    assert "does not declare; declare it or leave it out" in error.message


def test_a_key_that_a_validator_drops_is_intended() -> None:
    class Known(TypedDict):
        name: str

    def without_size(value: dict[str, Any]) -> dict[str, Any]:
        return {"name": value["name"]}

    annotation = Annotated[Known, BeforeValidator(without_size)]
    assert comes_back(annotation, {"name": "a", "size": 1}) == {"name": "a"}


def test_a_key_dropped_inside_of_a_dataclass_is_not_taken_for_two_equal_ones() -> None:
    @dataclasses.dataclass
    class Holder:
        entry: Entry

    error = is_refused(Holder, Holder({"data": b"", "size": 1}))  # type: ignore[typeddict-unknown-key]
    assert "value.entry would come back with other members" in error.message


def test_a_model_holding_a_value_of_another_type_is_refused() -> None:
    item = Item(name="a", price=1.0)
    item.price = "free"  # type: ignore[assignment]
    assert is_refused(Item, item).path == "value.price"
    assert is_refused(Item, Item.model_construct(name="a")).path == "value.price"
    assert is_refused(Item, Item.model_construct(name=Decimal(1), price=1.0)).path == "value.name"


def test_a_union_that_would_pick_another_member_is_refused() -> None:
    assert comes_back(int | str, "5") == "5"
    assert comes_back(uuid.UUID | int, uuid.UUID(int=1)) == uuid.UUID(int=1)
    error = is_refused(str | dt.datetime, dt.datetime(2020, 1, 1))
    assert "datetime" in error.message


def test_a_secret_that_would_be_stored_as_stars_is_refused() -> None:
    assert is_refused(SecretStr, SecretStr("x")).path == "value"


def test_an_offset_with_seconds_is_refused_rather_than_moved() -> None:
    offset = dt.timezone(dt.timedelta(hours=1, seconds=7))
    timestamp = dt.datetime(2020, 1, 1, tzinfo=offset)
    match CallSignature.of(anything).encode_call((timestamp,), {}):
        case Ok(_):
            pytest.fail("a datetime has no untyped form")
        case Err(error):
            assert error.path == "value"
    assert is_refused(dt.datetime, timestamp).path == "value"


@pytest.mark.parametrize("function", [untyped, anything])
def test_untyped_parameters_take_plain_json(function: Callable[..., Any]) -> None:
    value = {"a": [1, 2.5, None, True, "x"], "b": {"c": {}}, "__class__": "os.system"}
    assert returned(function, value).args[0] == value


def test_a_tuple_for_a_sequence_is_read_as_a_list() -> None:
    assert comes_back(Sequence[int], (1, 2)) == [1, 2]


@pytest.mark.parametrize(
    "value",
    [
        Decimal("1.5"),
        uuid.UUID(int=1),
        dt.datetime(2020, 1, 1),
        dt.timedelta(1),
        b"x",
        {1},
        (1, 2),
        Level.LOW,
        Pair(b"", 1),
        Blob(b""),
        Item(name="a", price=1.0),
        object(),
        len,
        int,
        1j,
        (number for number in (1, 2)),
    ],
)
def test_other_values_need_an_annotation(value: Any) -> None:
    assert refused(untyped, {"a": [value]}).path == "value.a[0]"


def test_keys_that_are_not_text_need_an_annotation() -> None:
    error = refused(untyped, {"a": {1: "x"}})
    assert error.path == "value.a[1]"
    assert "text keys" in error.message


@pytest.mark.parametrize(
    ("annotation", "value", "path"),
    [
        (Any, {1: "a", "1": "b"}, "value"),
        (Holder, Holder(content=[{None: 1, "None": 2}]), "value.content[0]"),
        (dict[int | str, int], {1: 1, "1": 2}, "value"),
        (dict[Level, int], {Level.LOW: 1, Level.ALSO_LOW_AS_TEXT: 2}, "value"),
    ],
)
def test_keys_that_become_the_same_text_are_refused(annotation: Any, value: Any, path: str) -> None:
    error = is_refused(annotation, value)
    assert error.path == path
    assert "same text" in error.message


@pytest.mark.parametrize("number", [NAN, INFINITY, -INFINITY])
@pytest.mark.parametrize(
    ("annotation", "wrap", "path"),
    [
        (float, lambda x: x, "value"),
        (float | None, lambda x: x, "value"),
        (Any, lambda x: x, "value"),
        (Any, lambda x: {"a": [1, x]}, "value.a[1]"),
        (list[float], lambda x: [1.0, x], "value[1]"),
        (dict[str, tuple[float, ...]], lambda x: {"a": (x,)}, "value.a[0]"),
        (Item, lambda x: Item(name="a", price=x), "value.price"),
        (list[Item], lambda x: [Item(name="a", price=x)], "value[0].price"),
        (Blob, lambda x: Blob(b"", x), "value.weight"),
        (Holder, lambda x: Holder(content={"a": x}), "value.content.a"),
        (dict[float, int], lambda x: {x: 1}, "value"),
        (Any, lambda x: {x: 1}, "value"),
    ],
)
def test_nan_and_infinities_are_refused_everywhere(
    annotation: Any, wrap: Callable[[float], Any], path: str, number: float
) -> None:
    error = is_refused(annotation, wrap(number))
    assert error.path.startswith(path)
    assert "NaN or infinite" in error.message


def test_nan_is_refused_whatever_a_model_makes_of_it() -> None:
    class AsText(BaseModel):
        model_config = ConfigDict(ser_json_inf_nan="strings")
        x: float

    class Lenient(BaseModel):
        x: float | None

    assert is_refused(AsText, AsText(x=NAN)).path == "value.x"
    assert is_refused(Lenient, Lenient(x=NAN)).path == "value.x"


def test_a_time_keeps_a_fixed_offset_and_is_refused_in_a_named_zone() -> None:
    for zone in (None, dt.UTC, dt.timezone(dt.timedelta(hours=5, minutes=30)), ZoneInfo("UTC")):
        given = dt.time(7, 30, tzinfo=zone)
        back = comes_back(dt.time, given)
        assert (back, back.utcoffset()) == (given, given.utcoffset())
    berlin = dt.time(7, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    assert "a zone whose offset depends on the date" in is_refused(dt.time, berlin).message
    assert is_refused(list[dt.time | None], [None, berlin]).path == "value[1]"
    assert is_refused(Holder, Holder(content=berlin)).path == "value.content"


@pytest.mark.parametrize("text", ["NaN", "Infinity", "sNaN"])
def test_decimals_that_are_not_finite_are_refused(text: str) -> None:
    assert is_refused(Decimal, Decimal(text)).path == "value"
    assert is_refused(Any, [Decimal(text)]).path == "value[0]"
    assert is_refused(Holder, Holder(content=Decimal(text))).path == "value.content"


@pytest.mark.parametrize(("text", "name"), [("a\x00b", "NUL"), ("a\ud800b", "surrogate")])
@pytest.mark.parametrize(
    ("annotation", "wrap", "path"),
    [
        (str, lambda x: x, "value"),
        (Any, lambda x: [{"a": x}], "value[0].a"),
        (list[str], lambda x: ["", x], "value[1]"),
        (Item, lambda x: Item(name="a", price=1.0, tags=[x]), "value.tags[0]"),
        (dict[str, int], lambda x: {x: 1}, "value["),
        (Any, lambda x: {"a": {x: 1}}, "value.a["),
        (Holder, lambda x: Holder(content=x), "value.content"),
    ],
)
def test_text_that_cannot_be_stored_is_refused_everywhere(
    annotation: Any, wrap: Callable[[str], Any], path: str, text: str, name: str
) -> None:
    try:
        value = wrap(text)
    except ValueError:
        value = Item.model_construct(name="a", price=1.0, tags=[text])
    error = is_refused(annotation, value)
    assert error.path.startswith(path)
    assert name in error.message
    error.message.encode()
    assert "\x00" not in error.message + error.path


def test_nul_that_only_a_serializer_writes_is_refused() -> None:
    class Sneaky(BaseModel):
        x: str

        @field_serializer("x")
        def with_nul(self, x: str) -> str:
            return x + "\x00"

    assert is_refused(Sneaky, Sneaky(x="a")).path == "value.x"


def test_integers_are_exact_up_to_what_the_reader_takes() -> None:
    assert comes_back(Any, [2**63, -(2**64), 10**400]) == [2**63, -(2**64), 10**400]
    assert is_refused(int, 10**4_300).path == "value"
    assert is_refused(list[int], [1, -(10**4_300)]).path == "value[1]"
    assert is_refused(Any, {"a": 10**5_000}).path == "value.a"


@pytest.mark.parametrize("depth", [180, 220, 300, 20_000])
def test_deep_nesting_is_carried_or_refused_but_never_raises(depth: int) -> None:
    value: Any = []
    for _ in range(depth):
        value = [value]
    match CallSignature.of(anything).encode_call((value,), {}):
        case Ok(call):
            assert CallSignature.of(anything).decode_call(call.args_json, "{}").is_ok()
            assert depth < 200
        case Err(error):
            assert "nested too deeply" in error.message
            assert error.path.startswith("value")


def test_values_that_contain_themselves_are_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert "contains itself" in is_refused(Any, loop).message
    node = Node()
    node.child = node
    assert "contains itself" in is_refused(Node, node).message


def test_a_long_chain_of_models_is_carried_or_refused() -> None:
    node = Node()
    for _ in range(400):
        node = Node.model_construct(child=node)
    assert is_refused(Node, node).path.startswith("value")


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("repr")

    def __str__(self) -> str:
        raise RuntimeError("str")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("eq")

    def __hash__(self) -> int:
        return 1

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("getattr")


class HostileError(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("str")


@pytest.mark.parametrize("annotation", [int, str, Any, Item, list[int], dict[str, Any], Holder])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: {"a": x}, lambda x: {x: 1}])
def test_a_hostile_object_is_refused_quietly(annotation: Any, wrap: Callable[[Any], Any]) -> None:
    assert is_refused(annotation, wrap(Hostile())).path.startswith("value")
    assert is_refused(Holder, Holder(content=wrap(Hostile()))).path.startswith("value.content")


def test_serializers_and_validators_that_raise_are_refused_quietly() -> None:
    class BadSerializer(BaseModel):
        x: int = 1

        @model_serializer
        def fail(self) -> dict[str, int]:
            raise HostileError

    class BadValidator(BaseModel):
        x: int = 1

        @field_validator("x")
        @classmethod
        def fail(cls, x: int) -> int:
            raise HostileError

    class BadEquality(BaseModel):
        x: int = 1

        def __eq__(self, other: object) -> bool:
            raise HostileError

    assert is_refused(BadSerializer, BadSerializer()).path == "value"
    assert is_refused(BadValidator, BadValidator()).path == "value"
    assert comes_back(BadEquality, BadEquality()).x == 1


@pytest.mark.parametrize("text", ["", "{}", "null", "1", "[1", "[1,]", "[1] x", "\x00", "\ud800"])
def test_text_that_is_no_list_is_an_error_without_a_path(text: str) -> None:
    error = unreadable(add, text)
    assert error.path == ""
    assert "JSON list" in error.message
    assert "JSON object" in unreadable(add, "[1]", "[2]").message


def test_a_stored_value_that_does_not_fit_is_an_error_with_its_path() -> None:
    assert unreadable(add, '[1,"2"]').path == "b"
    assert unreadable(add, "[1]", '{"b":null}').path == "b"
    assert unreadable(buy, '[[{"name":"a"}]]').path == "items[0].price"


@pytest.mark.parametrize(
    ("args_json", "kwargs_json", "fault"),
    [
        ("[1]", "{}", "argument 'b' is missing"),
        ("[1,2,3]", "{}", "too many"),
        ("[1,2]", '{"gone":1}', "there is no parameter 'gone'"),
        ("[1,2]", '{"a":1}', "given twice"),
        ("[]", "{}", "argument 'a' is missing"),
    ],
)
def test_a_call_stored_before_the_signature_changed_is_an_error(
    args_json: str, kwargs_json: str, fault: str
) -> None:
    error = unreadable(add, args_json, kwargs_json)
    assert fault in error.message
    assert "does not fit" in error.message


@pytest.mark.parametrize(
    "data",
    [
        {"__class__": "os.system", "args": ["true"]},
        {"__pydantic_model__": True, "module": "subprocess", "qualname": "Popen", "data": {}},
        {"__builtin_task_code__": "TASK_TIMEOUT"},
        {"__reduce__": ["os.system", ["true"]]},
        {"py/object": "antigravity.fly", "module": "this", "qualname": "s"},
    ],
)
def test_stored_data_never_names_a_class(data: dict[str, Any]) -> None:
    before = set(sys.modules)
    assert decoded(anything, json.dumps([data])).args == (data,)
    assert decode_untyped(json.dumps({"ok": data})) == Ok(TaskResult(ok=data))
    assert comes_back(Any, data) == data
    assert set(sys.modules) == before


def test_a_signature_names_an_annotation_that_cannot_be_resolved() -> None:
    def task(value: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(ValueError, match=r"task.*Nowhere.*module level"):
        CallSignature.of(task)


def test_names_local_to_a_function_can_be_passed_in() -> None:
    class Local(BaseModel):
        x: int

    def task(value: "Local") -> None: ...

    signature = CallSignature.of(task, {"Local": Local})
    assert signature.encode_call((Local(x=1),), {}) == Ok(EncodedCall('[{"x":1}]', "{}"))


@pytest.mark.parametrize("annotation", [Hostile, Iterable[int], Callable[[], int]])
def test_an_annotation_without_a_json_form_is_refused_with_the_parameter(annotation: Any) -> None:
    def task(value: Any) -> None: ...

    task.__annotations__["value"] = annotation
    with pytest.raises(ValueError, match="'value' is annotated with"):
        CallSignature.of(task)
    with pytest.raises(ValueError, match="'ok' is annotated with"):
        ResultCodec.of(annotation, TaskError)


def test_a_model_that_is_not_complete_is_refused() -> None:
    class Incomplete(BaseModel):
        x: "Later"  # type: ignore[name-defined]  # noqa: F821

    def task(value: Incomplete) -> None: ...

    with pytest.raises(ValueError, match="Later"):
        CallSignature.of(task)


def test_the_size_of_a_payload_is_counted_in_bytes() -> None:
    assert payload_bytes("abc") == 3
    assert payload_bytes("ü🐎") == 6


INT_RESULT = ResultCodec.of(int, TaskError)


def result_text(codec: ResultCodec, result: TaskResult[Any, Any]) -> str:
    match codec.encode(result):
        case Ok(text):
            return text
        case Err(error):
            pytest.fail(error.message)


def result_error(codec: ResultCodec, result: TaskResult[Any, Any]) -> CodecError:
    match codec.encode(result):
        case Ok(text):
            pytest.fail(f"stored as {text}")
        case Err(error):
            return error


def test_a_result_is_an_object_with_one_side() -> None:
    assert INT_RESULT.encode(TaskResult(ok=3)) == Ok('{"ok":3}')
    text = result_text(INT_RESULT, TaskResult(err=TaskError(error_code="LOW", message="m")))
    assert json.loads(text)["err"]["error_code"] == "LOW"


@pytest.mark.parametrize(
    ("ok_type", "value"),
    [
        (int, 3),
        (None, None),
        (str, '}{"ok":'),
        (list[Item], [Item(name="a", price=1.0)]),
        (Any, {"err": 1}),
        (tuple[dt.date, ...], (dt.date(2020, 1, 1),)),
        (Blob, Blob(b"\xff")),
        (bytes, b"\xff"),
    ],
)
def test_a_value_comes_back_from_a_result(ok_type: Any, value: Any) -> None:
    codec = ResultCodec.of(ok_type, TaskError)
    result = TaskResult[Any, Any](ok=value)
    assert codec.decode(result_text(codec, result)) == Ok(result)


def test_a_result_that_does_not_fit_its_type_is_refused_with_side_and_type() -> None:
    error = result_error(INT_RESULT, TaskResult(ok="3"))
    assert error.path == "ok"
    assert error.message.startswith("ok must be int (")
    assert INT_RESULT.ok_text == "int"
    assert INT_RESULT.err_text == "TaskError"
    assert result_error(INT_RESULT, TaskResult(err="text")).path == "err"
    assert ResultCodec.of(list[Item], TaskError).ok_text == "list[Item]"


def test_a_valid_float_result_given_as_integer_is_returned_as_float() -> None:
    codec = ResultCodec.of(float, TaskError)
    result = codec.decode(result_text(codec, TaskResult(ok=1))).unwrap()
    assert isinstance(result.ok_value, float)


def test_results_are_checked_for_what_json_cannot_hold() -> None:
    codec = ResultCodec.of(Any, TaskError)
    assert result_error(codec, TaskResult(ok={"a": [NAN]})).path == "ok.a[0]"
    assert result_error(codec, TaskResult(ok="\x00")).path == "ok"
    assert result_error(codec, TaskResult(ok=object())).path == "ok"
    assert result_error(codec, TaskResult(err=TaskError(data={"x": NAN}))).path == "err.data.x"
    assert result_error(codec, TaskResult(err=TaskError(data=Decimal(1)))).path == "err.data"


def test_encoding_distinguishes_a_mismatch_from_a_value_that_cannot_be_stored() -> None:
    codec = ResultCodec.of(dict[str, Any], TaskError)
    for mismatch in ([1], {1: 2}):
        assert isinstance(result_error(codec, TaskResult(ok=mismatch)), TypeMismatch)
    for unstorable in ({"a": object()}, {"a": NAN}, {"a": (Decimal(1),)}):
        assert type(result_error(codec, TaskResult(ok=unstorable))) is CodecError
    # A dict in place of a model is a mismatch even when its members cannot be written.
    holders = ResultCodec.of(Holder, TaskError)
    assert isinstance(result_error(holders, TaskResult(ok={"content": object()})), TypeMismatch)


def test_built_in_codes_come_back_as_members_and_user_codes_as_text() -> None:
    for code in (OutcomeCode.TASK_TIMEOUT, ContractCode.RETURN_TYPE_MISMATCH, "MINE", None):
        result = TaskResult[int, TaskError](err=TaskError(error_code=code, data={"a": [1]}))
        assert INT_RESULT.decode(result_text(INT_RESULT, result)) == Ok(result)


def test_a_live_exception_is_stored_as_its_description() -> None:
    try:
        raise KeyError("lost")
    except KeyError as exception:
        error = TaskError(error_code="X", exception=exception)
    for text in (result_text(INT_RESULT, TaskResult(err=error)), encode_task_error(error)):
        back = INT_RESULT.decode(text).unwrap().err_value
        assert back.exception["type"] == "KeyError"
        assert "Traceback" in back.exception["traceback"]


def test_a_sub_workflow_error_passes_where_a_task_error_is_declared() -> None:
    error = SubWorkflowError(error_code=OutcomeCode.SUBWORKFLOW_FAILED, sub_workflow_id="w")
    for text in (result_text(INT_RESULT, TaskResult(err=error)), encode_task_error(error)):
        assert INT_RESULT.decode(text) == Ok(TaskResult(err=error))
        assert decode_untyped(text) == Ok(TaskResult(err=error))


class PaymentError(TaskError):
    card: str


class LooseError(BaseModel):
    reason: str = "?"


LIBRARY_ERRORS = [
    TaskError(error_code=OperationalErrorCode.WORKER_CRASHED, message="died"),
    TaskError(error_code="MAPPED", message="from the mapper"),
    SubWorkflowError(error_code=OutcomeCode.SUBWORKFLOW_FAILED, sub_workflow_id="w"),
]


@pytest.mark.parametrize("error", LIBRARY_ERRORS)
@pytest.mark.parametrize(
    "err_type", [TaskError, PaymentError, LooseError, str, Any, dict[str, Any], LooseError | str]
)
def test_an_error_of_the_library_is_never_lost_in_the_declared_type(
    err_type: Any, error: TaskError
) -> None:
    assert ResultCodec.of(int, err_type).decode(encode_task_error(error)) == Ok(
        TaskResult(err=error)
    )


@pytest.mark.parametrize(
    ("err_type", "error"),
    [
        (PaymentError, PaymentError(error_code="DECLINED", card="visa")),
        (LooseError, LooseError(reason="late")),
        (str, "late"),
        (dict[str, int], {"error_code": 3}),
    ],
)
def test_an_error_of_a_declared_type_comes_back(err_type: Any, error: Any) -> None:
    codec = ResultCodec.of(int, err_type)
    text = result_text(codec, TaskResult(err=error))
    assert codec.decode(text) == Ok(TaskResult(err=error))
    untyped_error = decode_untyped(text).unwrap().err_value
    assert isinstance(untyped_error, TaskError)
    assert untyped_error.data == json.loads(text)["err"]


def test_an_error_with_fields_the_declared_type_lacks_is_refused() -> None:
    error = PaymentError(error_code="DECLINED", card="visa")
    assert "PaymentError" in result_error(INT_RESULT, TaskResult(err=error)).message


def test_reading_untyped_keeps_code_and_message_of_a_users_own_error() -> None:
    codec = ResultCodec.of(int, PaymentError)
    text = result_text(codec, TaskResult(err=PaymentError(error_code="D", message="m", card="v")))
    error = decode_untyped(text).unwrap().err_value
    assert (error.error_code, error.message) == ("D", "m")
    assert error.data["card"] == "v"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        "3",
        '"ok"',
        '{"ok":}',
        '{"ok":1',
        '{"ok":1,"err":2}',
        '{"err":null,"ok":1}',
        '{"ok":1,"ok":2}',
        '{"ok":1}}',
        '{"other":1}',
        '{"OK":1}',
        "\x00",
        "\ud800",
        '{"ok":"\ud800"}',
    ],
)
def test_text_that_is_no_result_is_an_error_without_a_path(text: str) -> None:
    for answer in (INT_RESULT.decode(text), decode_untyped(text)):
        assert isinstance(answer, Err)
        assert answer.value.path == ""


def test_reformatted_text_is_still_a_result() -> None:
    for text in ('{"ok": 3}', ' {\n "ok" : 3 }\n'):
        assert INT_RESULT.decode(text) == Ok(TaskResult(ok=3))
        assert decode_untyped(text) == Ok(TaskResult(ok=3))


def test_a_stored_value_that_no_longer_fits_names_its_side() -> None:
    error = ResultCodec.of(list[Item], TaskError).decode('{"ok":[{"name":"a"}]}').unwrap_err()
    assert error.path == "ok[0].price"
    assert INT_RESULT.decode('{"ok":"3"}').unwrap_err().path == "ok"
    assert INT_RESULT.decode('{"err":3}').unwrap_err().path == "err"


@pytest.mark.parametrize(
    "error",
    [
        TaskError(error_code="X", message="a\x00b\ud800", data={"x": NAN}),
        TaskError(error_code="X", data=object()),
        TaskError(error_code="X", data=Hostile()),
        TaskError(error_code="X", exception={"a": Hostile()}),
        TaskError(error_code="X", exception=HostileError()),
        PaymentError(error_code="X", card="visa"),
    ],
)
def test_an_error_of_the_library_can_always_be_stored(error: TaskError) -> None:
    text = encode_task_error(error)
    back = INT_RESULT.decode(text).unwrap().err_value
    assert back.error_code == "X"
    assert "\x00" not in json.dumps(json.loads(text))
    text.encode()


def test_an_error_that_is_broken_itself_is_stored_as_a_constant() -> None:
    for broken in (TaskError.model_construct(error_code=Hostile()), TaskError.__new__(TaskError)):
        back = INT_RESULT.decode(encode_task_error(broken)).unwrap().err_value
        assert back.error_code is OperationalErrorCode.WORKER_SERIALIZATION_ERROR
