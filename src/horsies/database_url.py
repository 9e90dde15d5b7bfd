"""Database addresses: which ones are accepted, how libpq wants them, how people may see them.

Stands below everything that connects or logs. `mask_url` is the one function between a password
and a log line, so in doubt it hides too much: a host lost from a message is only a nuisance.
"""

from __future__ import annotations

import re

MASK = "***"
EMBEDDED_SCHEME = "embedded://"

_ACCEPTED_SCHEMES = ("postgresql+psycopg://", "postgresql://", "postgres://", EMBEDDED_SCHEME)
_RENAMED_SCHEMES = ("postgresql+psycopg://", "postgres://")

# A password may hold any character, badly encoded ones included, so it reaches to the last "@" of
# the word: two addresses in one word become one, which is the safe direction.
_USERINFO = re.compile(r"(://[^\s:]*:)\S*@")

# A password with a raw space leaves its word without an "@". Only PostgreSQL addresses are followed
# across words, and not when what follows the colon reads like a port.
_USERINFO_WITH_SPACES = re.compile(
    r"(postgres(?:ql)?(?:\+\w+)?://[^\s:@/]*:)(?!\d{1,5}(?:\W|$)|\*\*\*@)[^@\n]*@"
)

# `password=` in a query string, in libpq's key=value form (quoted or not), as a keyword argument,
# as an environment variable, and `'password': …` of a printed dictionary. An unclosed quote hides
# the rest, and whatever is glued to a closed one belongs to the password as well.
_PARAMETER = re.compile(
    r"""
    (?P<query> [?&] \w*passw(?:or)?d= ) [^&\s]*
    | (?P<key> passw(?:or)?d (?: \s*=\s* | \\?["']\s*:\s* ) )
      (?: (?: \\'.*?(?:\\'|\Z) | \\".*?(?:\\"|\Z)
            | '(?:\\.|[^'\\])*(?:'|\Z) | "(?:\\.|[^"\\])*(?:"|\Z) ) [^\s,)}\]]*
        | (?:\\.|[^\s\\])+ )
    """,
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)


def mask_url(text: str) -> str:
    """Return the text with every database password in it replaced by `***`.

    Takes a URL, a libpq `key=value` string, or any longer message that quotes one.

        >>> mask_url("postgresql://app:s3cret@db:5432/shop")
        'postgresql://app:***@db:5432/shop'
    """
    text = _PARAMETER.sub(_masked_parameter, text)
    text = _USERINFO.sub(rf"\1{MASK}@", text)
    return _USERINFO_WITH_SPACES.sub(rf"\1{MASK}@", text)


def _masked_parameter(match: re.Match[str]) -> str:
    return f"{match['query'] or match['key']}{MASK}"


def libpq_url(url: str) -> str:
    """Return the URL the way libpq reads it: `postgresql+psycopg://` becomes `postgresql://`."""
    for scheme in _RENAMED_SCHEMES:
        if url.startswith(scheme):
            return "postgresql://" + url.removeprefix(scheme)
    return url


def is_embedded(url: str) -> bool:
    """Tell whether the URL asks for a private development server instead of naming one."""
    return url.startswith(EMBEDDED_SCHEME)


def url_problem(url: str) -> str | None:
    """Return one sentence saying why the URL is refused, or None when its scheme is accepted.

    The sentence never repeats the URL: the password may stand where the scheme should be.
    """
    if url.startswith(_ACCEPTED_SCHEMES):
        return None
    return (
        "the URL must start with postgresql:// or postgresql+psycopg://, "
        "or be embedded:// for a private development server"
    )
