"""Database URLs: the check of their scheme, their form for libpq, and the masking of passwords. Also the
names of schemas. Every text that may quote an address passes through `mask_url` before it is logged or
printed. `mask_url` hides too much rather than too little.
"""

from __future__ import annotations

import re

MASK = "***"
EMBEDDED_SCHEME = "embedded://"
URL_VARIABLES = ("HORSIES_DATABASE_URL", "DATABASE_URL")
SCHEMA_VARIABLE = "HORSIES_SCHEMA"
DEFAULT_SCHEMA = "public"
# Names that need no quotes in psql. PostgreSQL reserves names that start with pg_.
SCHEMA_NAME = re.compile(r"(?!pg_|information_schema$)[a-z_][a-z0-9_]{0,62}")

# The value of `options` in a query string, and the words of this value; a backslash escapes the next
# character.
_OPTIONS = re.compile(r"[?&]options=([^&#]*)")
_OPTION_WORD = re.compile(r"(?:\\.|[^\s\\])+", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)

_ACCEPTED_SCHEMES = ("postgresql+psycopg://", "postgresql://", "postgres://", EMBEDDED_SCHEME)
_RENAMED_SCHEMES = ("postgresql+psycopg://", "postgres://")

# A password may contain any character, even a badly encoded one, so the match extends to the last
# "@" of the word. Two addresses in one word are masked together. Atomic groups and the look-behind
# limit the search to one attempt per word; with one attempt per "://", a 195 kB line with 5,000
# URLs took 3 s.
_USERINFO = re.compile(r"(?<!\S)((?>\S*?://)(?>[^\s:]*:))\S*@")

# If a password contains a raw space, its word has no "@". The match continues across words only for
# PostgreSQL addresses whose text after the colon does not look like a port. The search makes one
# attempt per "@" or line.
_USERINFO_WITH_SPACES = re.compile(
    r"""
    (?<![^@\n])
    ( (?> [^@\n]*? postgres(?:ql)?(?:\+\w+)?://[^\s:@/]*: (?! \d{1,5}(?:\W|$) | \*\*\*@ ) ) )
    [^@\n]*@
    """,
    re.VERBOSE,
)

# `password=` in a query string, in libpq's key=value form (quoted or not), as a keyword argument, as an
# environment variable or as an annotated assignment, and `'password': …` in a printed dictionary. An
# unclosed quote hides everything after it, and text right after a closed quote is hidden too.
_PARAMETER = re.compile(
    r"""
    (?P<query> [?&] \w*passw(?:or)?d= ) [^&\s]*
    | (?P<key> passw(?:or)?d (?: (?: \s*:\s*\w+ )? \s*=\s* | \\?["']\s*:\s* ) )
      (?: (?: \\'.*?(?:\\'|\Z) | \\".*?(?:\\"|\Z)
            | '(?:\\.|[^'\\])*(?:'|\\?\Z) | "(?:\\.|[^"\\])*(?:"|\\?\Z) ) [^\s,)}\]]*
        | (?:\\.|[^\s\\])+ )
    """,
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)


def mask_url(text: str) -> str:
    """Return the text with every database password in it replaced by `***`.

    The text may be a URL, a libpq `key=value` string, or a message that contains them.

        >>> mask_url("postgresql://app:s3cret@db:5432/shop")
        'postgresql://app:***@db:5432/shop'
    """
    # This check avoids the search on most log lines; a case-insensitive search takes ten times as
    # long.
    if "passw" in text.casefold():
        text = _PARAMETER.sub(lambda match: f"{match['query'] or match['key']}{MASK}", text)
    if "://" not in text or "@" not in text:
        return text
    text = _USERINFO.sub(rf"\1{MASK}@", text)
    return _USERINFO_WITH_SPACES.sub(rf"\1{MASK}@", text)


def libpq_url(url: str) -> str:
    """Return the URL in the form that libpq accepts: `postgresql+psycopg://` becomes `postgresql://`."""
    for scheme in _RENAMED_SCHEMES:
        if url.startswith(scheme):
            return "postgresql://" + url.removeprefix(scheme)
    return url


def is_embedded(url: str) -> bool:
    """Return whether the URL requests a private development server."""
    return url.startswith(EMBEDDED_SCHEME)


def database_name(url: str) -> str:
    """Return the database name in a URL, or an empty text if the URL does not name a database.

    >>> database_name("postgresql://app@db1,db2/shop?sslmode=require")
    'shop'
    """
    # Imported here, because only commands for several databases need it.
    from urllib.parse import unquote

    _, _, path = re.split(r"[?#]", url, maxsplit=1)[0].partition("://")
    return unquote(path.rpartition("/")[2]) if "/" in path else ""


def url_problem(url: str) -> str | None:
    """Explain in one sentence why the URL is rejected, or return None if its scheme is accepted.

    The sentence never repeats the URL, because the password may be in the place of the scheme.
    """
    if url.startswith(_ACCEPTED_SCHEMES):
        return None
    if url.startswith("embedded:"):
        return "write embedded:// alone, or embedded:///some/directory, with three slashes"
    return (
        "the URL must start with postgresql:// or postgresql+psycopg://, "
        "or be embedded:// for a private development server"
    )


def search_path_in_url(url: str) -> str | None:
    """Return the search_path that the `options` of a URL set, or None.

    >>> search_path_in_url("postgresql://db/shop?options=-csearch_path%3Djobs")
    'jobs'
    """
    given = _OPTIONS.search(url)
    if given is None:
        return None
    from urllib.parse import unquote  # Imported here, because few URLs have options.

    return search_path_in_options(unquote(given[1]))


def search_path_in_options(options: str) -> str | None:
    """Return the search_path set by a session's command-line options, as in PGOPTIONS, or None.

    PostgreSQL accepts `-c name=value`, `-cname=value` and `--name=value`; the last one wins.
    """
    words = [_ESCAPED.sub(r"\1", word) for word in _OPTION_WORD.findall(options)]
    found = None
    for before, word in zip(["", *words], words, strict=False):
        setting = word if before == "-c" else word.removeprefix("-c").removeprefix("--")
        name, equals, value = setting.partition("=")
        is_setting = before == "-c" or setting != word
        if is_setting and equals and name.replace("-", "_").casefold() == "search_path":
            found = value
    return found


def channel_prefix(schema: str) -> str:
    """Return the prefix of all channels of a schema.

    The default schema has its own prefix. Any other prefix has nine bytes, because PostgreSQL limits a
    channel name to 63 bytes.
    """
    if schema == DEFAULT_SCHEMA:
        return ""
    # Imported here, because most processes need no digest, and hashlib loads OpenSSL.
    from hashlib import sha256

    return f"{sha256(schema.encode()).hexdigest()[:8]}_"
