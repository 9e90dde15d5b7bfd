"""Run the code of other systems that the pages about migrations show: ``make test-other-systems``.

Each page shows an application before its migration. Its code runs here with the release that the
benchmark measures, on a private Redis and PostgreSQL, and must send the tasks that the page shows.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

from benchmarks.peers.environment import OVERLAYS
from benchmarks.peers.servers import Servers, all_servers

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"^```python other-system\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SCHEMA = """
import procrastinate
with procrastinate.App(connector=procrastinate.SyncPsycopgConnector()).open() as before:
    before.schema_manager.apply_schema()
"""
_SENT_WITH_PROCRASTINATE = """
import asyncio, psycopg
asyncio.run(main())
with psycopg.connect() as connection:
    assert connection.execute("SELECT count(*) FROM procrastinate_jobs").fetchone() == (1,)
"""


@dataclass(frozen=True)
class Shown:
    """How to run a page's code: its Redis address, the code to run before it, and the conditions
    afterwards.
    """

    after: str
    before: str = ""
    address: str = ""
    replacement: str = ""


SYSTEMS = {
    "celery": Shown(
        'assert redis.llen("celery") == 2', "", "redis://localhost", "redis://localhost:{port}"
    ),
    "rq": Shown(
        'assert (job.get_status(), after.get_status()) == ("queued", "deferred")',
        address="Redis()",
        replacement="Redis(port={port})",
    ),
    "dramatiq": Shown(
        'assert redis.llen("dramatiq:mail.DQ") == 1',
        address='"redis://localhost"',
        replacement='"redis://localhost:{port}"',
    ),
    "arq": Shown(
        'import asyncio\nasyncio.run(main())\nassert redis.zcard("arq:queue") == 1',
        address="RedisSettings()",
        replacement="RedisSettings(port={port})",
    ),
    "procrastinate": Shown(_SENT_WITH_PROCRASTINATE, _SCHEMA),
}


def script_of(system: str, port: str) -> str:
    """Return the code of a system's page for this Redis, with the code before and after it."""
    shown = SYSTEMS[system]
    (text,) = _BLOCK.findall((DOCS / f"coming-from-{system}.md").read_text("utf-8"))
    assert shown.address in text, f"the page of {system} has another address"
    there = text.replace(shown.address, shown.replacement.format(port=port))
    redis = f"import redis\nredis = redis.Redis(port={port})\nredis.flushall()\n"
    return f'__name__ = "shop"\n{redis}{shown.before}\n{there}\n{shown.after}\n'


def variables_of(system: str, servers: Servers) -> dict[str, str]:
    """Return the environment of a system: its own packages, and the database URL for libpq."""
    names = {"dbname": "PGDATABASE", "user": "PGUSER", "password": "PGPASSWORD"}
    names |= {"host": "PGHOST", "port": "PGPORT"}
    parts = conninfo_to_dict(servers.postgres)
    database = {name: str(parts[part]) for part, name in names.items() if parts.get(part)}
    overlay = Path(sys.prefix, OVERLAYS, system)
    return {**os.environ, **database, "PYTHONPATH": str(overlay) if overlay.exists() else ""}


def main() -> int:
    """Run the code of every page, print the results, and return 1 if a page failed."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="horsies-shown-", ignore_cleanup_errors=True) as name:
        place = Path(name)
        place.chmod(0o755)
        with all_servers(place, {"Redis"}) as servers:
            if not servers.redis:
                sys.exit(servers.missing["Redis"])
            port = servers.redis.rpartition(":")[2].partition("/")[0]
            for system in SYSTEMS:
                command = [sys.executable, "-c", script_of(system, port)]
                done = subprocess.run(command, env=variables_of(system, servers), check=False)
                print(f"{system}: {'ok' if done.returncode == 0 else 'FAILED'}", flush=True)
                failed += done.returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
