from __future__ import annotations

import re
import time
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horsies.database_url import (
    is_embedded,
    libpq_url,
    mask_url,
    search_path_in_options,
    search_path_in_url,
    url_problem,
)
from tests.support.examples import examples

SECRET = "hunter2"

any_text = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=8)
any_word = st.text(alphabet="aZ09:@/?#&=%'\"\\[]{}()*+,;.~!$-_|é", max_size=8)
schemes = st.sampled_from(["postgresql", "postgresql+psycopg", "postgres"])
users = st.text(alphabet="abcXYZ019_-.%", max_size=6)
tails = st.sampled_from(["db", "db:5432/shop", "[::1]:5432/shop?sslmode=require", "/shop", ""])
process_state = st.sampled_from(
    [
        ("", ""),
        ("connection to ", " failed: timeout"),
        ('could not open "', '"'),
        ("(psycopg.OperationalError) [", "]\nDETAIL: a@b.example"),
        ("host:5432 a=b ", " c=d"),
    ]
)


def quoted(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


@settings(max_examples=examples(150), deadline=None)
@given(schemes, users, any_text, any_text, tails, process_state)
def test_an_encoded_password_never_survives(
    scheme: str, user: str, before: str, after: str, tail: str, around: tuple[str, str]
) -> None:
    password = quote(before, safe="") + SECRET + quote(after, safe="")
    masked = mask_url(f"{around[0]}{scheme}://{user}:{password}@{tail}{around[1]}")
    assert SECRET not in masked
    assert masked.startswith(f"{around[0]}{scheme}://")


@settings(max_examples=examples(150), deadline=None)
@given(schemes, users, any_word, any_word, tails, process_state)
def test_a_badly_encoded_password_never_survives(
    scheme: str, user: str, before: str, after: str, tail: str, around: tuple[str, str]
) -> None:
    text = f"{around[0]}{scheme}://{user}:{before}{SECRET}{after}@{tail}{around[1]}"
    assert SECRET not in mask_url(text)


@settings(max_examples=examples(150), deadline=None)
@given(any_text, any_text, process_state)
def test_a_quoted_password_parameter_never_survives(
    before: str, after: str, around: tuple[str, str]
) -> None:
    value = quoted(before + SECRET + after)
    text = f"{around[0]}host=db password = {value} user=app{around[1]}"
    assert SECRET not in mask_url(text)


@settings(max_examples=examples(100), deadline=None)
@given(any_word.filter(lambda text: text[:1] not in {"'", '"', "\\"}), any_word, process_state)
def test_a_bare_password_parameter_never_survives(
    before: str, after: str, around: tuple[str, str]
) -> None:
    text = f"{around[0]}host=db password={before}{SECRET}{after} user=app{around[1]}"
    assert SECRET not in mask_url(text)


@settings(max_examples=examples(100), deadline=None)
@given(any_text, any_text, process_state)
def test_a_password_in_the_query_string_never_survives(
    before: str, after: str, around: tuple[str, str]
) -> None:
    password = quote(before, safe="") + SECRET + quote(after, safe="")
    url = f"postgresql://app@db/shop?sslmode=require&password={password}&application_name=x"
    assert SECRET not in mask_url(around[0] + url + around[1])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("postgresql://app:s3cret@db:5432/shop", "postgresql://app:***@db:5432/shop"),
        ("postgresql+psycopg://app:s3@db/shop", "postgresql+psycopg://app:***@db/shop"),
        ("postgresql://app:p@ss:w@rd@db/shop", "postgresql://app:***@db/shop"),
        ("postgresql://:s3cret@db", "postgresql://:***@db"),
        ("postgresql://app:two words@db/shop", "postgresql://app:***@db/shop"),
        (
            "postgresql://db/shop?password=s3cret&sslmode=require",
            "postgresql://db/shop?password=***&sslmode=require",
        ),
        ("postgresql://db/shop?sslpassword=s3cret", "postgresql://db/shop?sslpassword=***"),
        ("host=db password=s3cret user=app", "host=db password=*** user=app"),
        (r"password='it\'s secret' host=db", "password=*** host=db"),
        ("password = 's3 cret' host=db", "password = *** host=db"),
        ("password='never closed host=db", "password=***"),
        ("password='never closed s3cret\\", "password=***"),
        ('password="never closed s3cret\\', "password=***"),
        (
            "postgresql://a:s3cret@h1,postgresql://b:s3cret@h2 postgresql://c:more s3cret@h3",
            "postgresql://a:***@h2 postgresql://c:***@h3",
        ),
        ("connect('db', password=s3cret@db:5432/x?y)", "connect('db', password=***"),
        ("connect(host='db', password='s3 cret', user='app')", None),
        ("{'password': 's3 cret', 'host': 'db'}", "{'password': ***, 'host': 'db'}"),
        ("PGPASSWORD=s3cret horsies worker", "PGPASSWORD=*** horsies worker"),
    ],
)
def test_passwords_are_masked_and_the_rest_stays_readable(text: str, expected: str | None) -> None:
    masked = mask_url(text)
    assert "cret" not in masked
    assert masked == (expected or "connect(host='db', password=***, user='app')")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "postgresql://app@db:5432/shop",
        "postgresql://db:5432/shop",
        "postgresql:///shop",
        "embedded://",
        'FATAL: password authentication failed for user "app"',
        "no address in here: 12:30, mail a@b.example",
        "postgresql://db:5432/shop is down, mail admin@b.example",
        "see https://example.org/docs#anchor",
    ],
)
def test_text_without_a_password_stays_as_it_is(text: str) -> None:
    assert mask_url(text) == text


@settings(max_examples=examples(100), deadline=None)
@given(schemes, users, any_word, tails)
def test_masking_twice_changes_nothing_more(
    scheme: str, user: str, password: str, tail: str
) -> None:
    once = mask_url(f"{scheme}://{user}:{password}@{tail}")
    assert mask_url(once) == once


# The same rules in their plain form, which takes quadratic time.
PLAIN_USERINFO = re.compile(r"(://[^\s:]*:)\S*@")
PLAIN_USERINFO_WITH_SPACES = re.compile(
    r"(postgres(?:ql)?(?:\+\w+)?://[^\s:@/]*:)(?!\d{1,5}(?:\W|$)|\*\*\*@)[^@\n]*@"
)
pieces = st.sampled_from(
    [*"ab1@:/ \n*+?&='\"\\", "://", "postgres://", "postgresql+x://u:", "http://h:1", "5432", "***"]
)


@settings(max_examples=examples(600), deadline=None)
@given(st.lists(pieces, max_size=16).map("".join))
def test_addresses_are_masked_as_by_the_plain_rules(text: str) -> None:
    masked = PLAIN_USERINFO.sub(r"\1***@", text)
    assert mask_url(text) == PLAIN_USERINFO_WITH_SPACES.sub(r"\1***@", masked)


@pytest.mark.parametrize(
    "piece",
    [
        "http://host:80,",
        "postgres://host:x ",
        "postgres://host:x,",
        "postgres+",
        "://",
        "://a:b@c ",
        "password",
        "password:a",
        "password='a ",
        r"password=\'a ",
        'password="\\',
        "?passwd",
        "@",
        "password   ",
    ],
)
def test_masking_takes_linear_time(piece: str) -> None:
    assert cpu_seconds(piece * 16_000) < 24 * cpu_seconds(piece * 2_000) + 0.01


def cpu_seconds(text: str) -> float:
    """The least processor time of three maskings: eight times as much text costs eight times as much."""
    seconds = []
    for _ in range(3):
        began_at = time.process_time()
        mask_url(f"a@b://c {text}")
        seconds.append(time.process_time() - began_at)
    return min(seconds)


@pytest.mark.parametrize("scheme", ["postgresql+psycopg", "postgresql", "postgres"])
def test_libpq_gets_its_own_scheme(scheme: str) -> None:
    assert libpq_url(f"{scheme}://app:p@db/shop?x=1") == "postgresql://app:p@db/shop?x=1"


def test_an_embedded_address_is_left_alone() -> None:
    assert libpq_url("embedded://") == "embedded://"
    assert is_embedded("embedded://")
    assert not is_embedded("postgresql://db/shop")


@pytest.mark.parametrize(
    "url",
    ["postgresql://db", "postgres://db", "postgresql+psycopg://app:p@db/shop", "embedded://"],
)
def test_postgresql_and_embedded_addresses_are_accepted(url: str) -> None:
    assert url_problem(url) is None


@pytest.mark.parametrize(
    "url",
    [
        "",
        "mysql://app:hunter2@db/shop",
        "postgresql+asyncpg://app:hunter2@db/shop",
        "app:hunter2@db/shop",
        "host=db password=hunter2",
        " postgresql://app:hunter2@db",
    ],
)
def test_other_addresses_are_refused_with_the_fix_and_without_the_password(url: str) -> None:
    problem = url_problem(url)
    assert problem is not None
    assert "postgresql://" in problem
    assert "embedded://" in problem
    assert SECRET not in problem


@pytest.mark.parametrize("url", ["embedded:/tmp/x", "embedded:tmp", "embedded:"])
def test_an_embedded_address_without_its_slashes_is_answered_with_them(url: str) -> None:
    problem = url_problem(url)
    assert problem is not None
    assert "embedded:///some/directory, with three slashes" in problem


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("-csearch_path=jobs", "jobs"),
        ("-c search_path=jobs,public", "jobs,public"),
        ("--search_path=jobs", "jobs"),
        ("--search-path=jobs", "jobs"),
        ("-c  Search_Path=jobs -c work_mem=9MB", "jobs"),
        ("-c search_path=jobs -c search_path=other", "other"),
        ("-c search_path=jobs,\\ public", "jobs, public"),
        ("-c work_mem=9MB", None),
        ("-c role=search_path=x", None),
        ("search_path=jobs", None),
        ("-c search_path", None),
        ("", None),
    ],
)
def test_a_search_path_in_options_is_found_as_postgresql_reads_it(
    options: str, expected: str | None
) -> None:
    assert search_path_in_options(options) == expected
    url = f"postgresql://app@db/shop?sslmode=require&options={quote(options)}&connect_timeout=3"
    assert search_path_in_url(url) == expected
    assert search_path_in_url("postgresql://app@db/shop?application_name=options") is None
