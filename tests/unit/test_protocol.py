"""Frames: decoding reverses encoding, and other bytes are refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horsies.captured_log import CapturedLog
from horsies.failure_fingerprint import Origin
from horsies.parking import ParkRequest
from horsies.worker import protocol
from horsies.worker.protocol import (
    Assignment,
    ChildBoot,
    ChildReport,
    FrameBuffer,
    FrameKind,
    NodeInput,
    NodePart,
    ProtocolError,
)
from tests.support.examples import examples

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)
numbers = st.integers(-(2**63), 2**63 - 1)
parts = st.builds(
    NodePart,
    workflow_id=texts,
    task_index=st.integers(0, 2**31 - 1),
    inputs_json=st.none() | texts,
    sources=st.lists(
        st.builds(
            NodeInput,
            task_index=st.integers(0, 2**31 - 1),
            kind=texts,
            task_name=texts,
            result=texts,
            sub_definition_key=st.none() | texts,
            sub_workflow_summary=st.none() | texts,
        ),
        max_size=3,
    ).map(tuple),
    root_workflow_id=st.none() | texts,
    depth=st.integers(0, 32),
)
assignments = st.builds(
    Assignment,
    task_id=texts,
    generation=numbers,
    task_name=texts,
    attempt=st.integers(0, 2**31 - 1),
    args_json=texts,
    kwargs_json=texts,
    timeout_ms=st.none() | st.integers(0, 2**62),
    node=st.none() | parts,
)
counts = st.integers(0, 2**31 - 1)
logs = st.builds(
    CapturedLog,
    body=st.text(st.characters(exclude_characters="\0"), max_size=50),
    dropped=counts,
    cut_after=counts,
)
reports = st.builds(
    ChildReport,
    task_id=texts,
    generation=numbers,
    ok=st.booleans(),
    result_json=texts,
    error_code=st.none() | texts,
    error_message=st.none() | texts,
    exception_names=st.lists(st.text(max_size=20), max_size=3).map(tuple),
    retry_after=st.none() | st.floats(0, 31_536_000),
    traceparent=st.none() | st.text(max_size=60),
    origin=st.builds(Origin, st.none() | st.text(max_size=60), st.none() | st.text(max_size=60)),
    transaction=st.sampled_from(protocol.TransactionEnd),
    park=st.none(),
    log=st.none() | logs,
)


@given(assignments)
@settings(max_examples=examples(100))
def test_an_assignment_arrives_as_it_was_sent(assignment: Assignment) -> None:
    assert protocol.decode_assignment(protocol.encode_assignment(assignment)) == assignment


def test_a_part_in_a_workflow_with_wrong_lengths_is_refused() -> None:
    source = NodeInput(0, "task", "load", '{"ok":1}')
    node = NodePart("run", 1, '{"args":{"a":0},"context":{}}', (source,))
    frame = protocol.encode_assignment(Assignment("task", 1, "add", 1, "[]", "{}", None, node))
    with pytest.raises(ProtocolError, match="do not add up"):
        protocol.decode_assignment(frame[:-1])
    with pytest.raises(ProtocolError, match="cannot be read"):
        protocol.decode_assignment(frame.replace(b'[["run"', b'[[{run"'))


@given(reports, st.integers(0, 2**62))
@settings(max_examples=examples(100))
def test_a_report_arrives_as_it_was_sent(report: ChildReport, rss_bytes: int) -> None:
    frame = protocol.encode_report(report, rss_bytes, 1_234)
    assert protocol.decode_report(frame) == (report, rss_bytes, 1_234)


@pytest.mark.parametrize(
    "request_",
    [ParkRequest(), ParkRequest(2.5, ("go", "stop"), ("a",)), ParkRequest(problem='it is "new"')],
)
def test_a_wait_arrives_as_it_was_sent(request_: ParkRequest) -> None:
    report = ChildReport("task", 3, True, "", None, None, park=request_)
    assert protocol.decode_report(protocol.encode_report(report))[0] == report


@pytest.mark.parametrize(
    "text",
    [
        "[",
        "[]",
        '{"seconds": "5"}',
        '{"seconds": -1}',
        '{"seconds": NaN}',
        '{"signals": [1]}',
        '{"x": 1}',
    ],
)
def test_a_wait_that_cannot_be_read_is_refused(text: str) -> None:
    report = ChildReport("task", 3, True, "", None, None, park=ParkRequest())
    frame = bytearray(protocol.encode_report(report._replace(park=None, result_json=text)))
    frame[13] |= 0b100000
    with pytest.raises(ProtocolError, match="the wait of its run cannot be read"):
        protocol.decode_report(bytes(frame))


def test_half_characters_in_a_report_are_escaped() -> None:
    report = ChildReport("x", 1, False, "{}", "CODE", "file \udc80.txt")
    arrived, _, _ = protocol.decode_report(protocol.encode_report(report))
    assert arrived.error_message == "file \\udc80.txt"


@pytest.mark.parametrize(
    "part",
    [
        *(b"[", b"[1]", b'[[], "soon", null, null, null, null]'),
        *(b"[[], NaN, null, null, null, null]", b"[5, null, null, null, null, null]"),
        *(b"[[], null, null, null]", b"[[], null, null, [5], null, null]"),
    ],
)
def test_a_rest_that_cannot_be_read_is_refused(part: bytes) -> None:
    report = ChildReport("task", 1, False, "{}", "X", None, exception_names=("builtins.OSError",))
    frame = protocol.encode_report(report)
    with pytest.raises(ProtocolError, match="remaining fields cannot be read"):
        protocol.decode_report(
            frame.replace(b'[["builtins.OSError"], null, null, null, null, null]', part)
        )


@given(st.lists(reports, min_size=1, max_size=5), st.data())
@settings(max_examples=examples(100))
def test_frames_survive_any_chopping_of_the_stream(
    sent: list[ChildReport], data: st.DataObject
) -> None:
    stream = b"".join(protocol.encode_report(report) for report in sent)
    frames = FrameBuffer()
    arrived: list[bytes] = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        arrived += frames.feed(stream[:size])
        stream = stream[size:]
    assert [protocol.decode_report(frame)[0] for frame in arrived] == sent
    assert frames.wanted_bytes() == 0


@given(st.data())
@settings(max_examples=examples(200))
def test_bytes_that_are_missing_never_make_an_assignment_of_two(data: st.DataObject) -> None:
    """What arrives before and behind the gap is whole, also where all frames have the same length."""
    count, length = 5, data.draw(st.integers(0, 40))
    names = [str(number) * length for number in range(1, 1 + count)]
    sent = [Assignment("task", 1, name, 1, "[]", "{}", None) for name in names]
    frames = [protocol.encode_assignment(one, number) for number, one in enumerate(sent, 1)]
    stream = b"".join(frames)
    start = data.draw(st.integers(0, len(stream)))
    end = data.draw(st.integers(start, len(stream)) | st.just(start + len(frames[0])))
    buffer = FrameBuffer()
    arrived: list[Assignment] = []
    try:
        for part in (stream[:start], stream[end:]):
            for frame in buffer.feed(part):
                number, _ = protocol.assignment_number(frame)
                assert frame == frames[number - 1]
                arrived.append(protocol.decode_assignment(frame))
    except ProtocolError:
        pass
    assert arrived[: start // len(frames[0])] == sent[: start // len(frames[0])]


@given(st.binary(max_size=200))
@settings(max_examples=examples(300))
def test_garbage_is_waited_for_or_refused_but_never_believed(garbage: bytes) -> None:
    decoders = (
        protocol.decode_report,
        protocol.decode_assignment,
        protocol.decode_numbers,
        lambda frame: protocol.decode_texts(frame, 1),
    )
    try:
        frames = FrameBuffer().feed(garbage)
    except ProtocolError:
        return
    for frame in frames:
        for decode in decoders:
            try:
                decode(frame)
            except ProtocolError:
                continue


@pytest.mark.parametrize("size", [0, 2**30 + 1, 2**32 - 1])
def test_an_impossible_length_is_refused_before_anything_is_kept(size: int) -> None:
    with pytest.raises(ProtocolError, match=str(size)):
        FrameBuffer().feed(size.to_bytes(4, "big") + b"\x06rest")


def test_a_report_with_wrong_lengths_is_refused() -> None:
    frame = bytearray(protocol.encode_report(ChildReport("task", 1, True, "{}", None, None)))
    frame[-1:] = b""
    with pytest.raises(ProtocolError, match="do not add up"):
        protocol.decode_report(bytes(frame))
    with pytest.raises(ProtocolError, match="malformed report"):
        protocol.decode_report(b"\x00\x00\x00\x01\x06")


@pytest.mark.parametrize("seconds", ["9" * 400, "NaN", "1e400", '"soon"', "[]"])
def test_a_report_that_asks_for_an_impossible_retry_is_refused(seconds: str) -> None:
    asking = ChildReport("task", 1, False, "{}", "C", "m", retry_after=1.0)
    frame = protocol.encode_report(asking)
    start = frame.rindex(b"[[]")
    forged = frame[4:start] + f"[[],{seconds},null]".encode()
    with pytest.raises(ProtocolError, match="its remaining fields cannot be read"):
        protocol.decode_report(len(forged).to_bytes(4, "big") + forged)


@pytest.mark.parametrize("body", [b"{", b"{}", b"[1]", b'["a", "b"]', b"[" * 100_000])
def test_texts_that_are_none_are_refused(body: bytes) -> None:
    frame = (len(body) + 1).to_bytes(4, "big") + bytes([FrameKind.BOOT_FAILED]) + body
    with pytest.raises(ProtocolError):
        protocol.decode_texts(frame, 1)


def test_boot_values_cross_into_a_fresh_interpreter() -> None:
    boot = ChildBoot("shop:app", ("shop.tasks",), ("/srv",), "DEBUG", "json", hook_budget_seconds=2)
    assert protocol.decode_boot(protocol.encode_boot(boot, 42)) == (boot, 42)
    assert json.dumps(boot.app_locator) == '"shop:app"'


MARK = bytes(range(1, 9))


@given(
    st.lists(st.binary(max_size=40).filter(lambda noise: MARK[:1] not in noise), max_size=4),
    st.integers(1, 50),
)
def test_bytes_between_marked_frames_are_passed_over(noise: list[bytes], step: int) -> None:
    frame = protocol.encode_numbers(FrameKind.READY, 1, 2)
    stream = b"".join(one + MARK + frame for one in noise)
    frames = FrameBuffer(MARK)
    found = [
        one for at in range(0, len(stream), step) for one in frames.feed(stream[at : at + step])
    ]
    assert found == [frame] * len(noise)
    assert frames.has_foreign_bytes == any(noise)
    assert frames.pending_bytes == 0


@pytest.mark.parametrize(
    "header", [(1 << 20, FrameKind.READY), (1 << 27, FrameKind.PROGRESS), (10, 99), (0, 6)]
)
def test_the_header_of_an_impossible_frame_is_refused_before_its_body(
    header: tuple[int, int],
) -> None:
    with pytest.raises(ProtocolError, match="claims a length"):
        FrameBuffer(MARK).feed(MARK + header[0].to_bytes(4, "big") + bytes([header[1]]))


def test_the_beginning_of_a_frame_is_counted_until_it_is_whole() -> None:
    frames = FrameBuffer(MARK)
    frame = protocol.encode_numbers(FrameKind.READY, 1, 2)
    assert frames.feed(b"noise" + MARK + frame[:7]) == []
    assert frames.pending_bytes == 7
    assert frames.feed(frame[7:]) == [frame]
    assert frames.pending_bytes == 0


@given(assignments, st.none() | logs)
@settings(max_examples=examples(50))
def test_the_log_of_a_stopped_task_arrives_as_it_was_sent(
    assignment: Assignment, log: CapturedLog | None
) -> None:
    frame = protocol.encode_stopped(assignment, log)
    assert protocol.decode_stopped(frame) == (assignment.task_id, log)


@pytest.mark.parametrize("log", ["[", "[1]", '["x", -1, 0]'])
def test_a_stopped_task_with_an_unreadable_log_is_refused(log: str) -> None:
    frame = protocol.encode_texts(protocol.FrameKind.TASK_STOPPED, "id", "1", log)
    with pytest.raises(ProtocolError, match="the log of its task cannot be read"):
        protocol.decode_stopped(frame)
