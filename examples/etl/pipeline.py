"""Extract, transform, load: CSV files become a table, in a workflow that a schedule starts every night."""

import csv
from datetime import date, time
from pathlib import Path

import psycopg
from pydantic import BaseModel, ValidationError

from horsies import (
    AppConfig,
    DailySchedule,
    Horsies,
    MapNode,
    PostgresConfig,
    RetryPolicy,
    ScheduleConfig,
    WorkflowDefinition,
    WorkflowSchedule,
    WorkflowSpec,
    current_task,
    from_node,
)

DATA = Path(__file__).parent / "data"
NIGHTLY = WorkflowSchedule(
    name="nightly-sales",
    definition="etl.sales",
    kwargs={"directory": str(DATA)},
    pattern=DailySchedule(time=time(2, 0)),
    timezone="UTC",
    overlap="skip",  # a slot is left out while the run before it is still open
)

app = Horsies(
    AppConfig(
        broker=PostgresConfig.from_env(),
        schedule=ScheduleConfig(schedules=[NIGHTLY]),
    )
)


class Sale(BaseModel):
    """One valid row."""

    day: date
    article: str
    cents: int


class Cleaned(BaseModel):
    """The valid rows of one file, and how many were rejected."""

    file: str
    sales: list[Sale]
    rejected: int


class Report(BaseModel):
    """The outcome of a run."""

    files: int
    loaded: int
    rejected: int
    cents: int


@app.task
def list_files(directory: Path) -> list[Path]:
    """Extract: find the files to read."""
    return sorted(directory.glob("*.csv"))


@app.task(
    timeout_ms=60_000,
    retry_policy=RetryPolicy.exponential(1, max_retries=5, auto_retry_for=[OSError]),
)
def clean(file: Path) -> Cleaned:
    """Transform: keep the valid rows of one file. An unreadable file is tried again."""
    sales, rejected = [], 0
    with file.open(newline="") as lines:
        for row in csv.DictReader(lines):
            try:
                sales.append(Sale.model_validate(row))
            except ValidationError:
                rejected += 1
    current_task().logger.info("%s: %d rows, %d rejected", file.name, len(sales), rejected)
    return Cleaned(file=file.name, sales=sales, rejected=rejected)


@app.task(retry_policy=RetryPolicy.fixed([1, 5], auto_retry_for=[psycopg.OperationalError]))
def load(cleaned: list[Cleaned]) -> Report:
    """Load: replace the table in one transaction, so that a repeated run has the same effect."""
    rows = [(sale.day, sale.article, sale.cents) for one in cleaned for sale in one.sales]
    with psycopg.connect(app.database_url) as connection, connection.cursor() as cursor:
        cursor.execute("CREATE TABLE IF NOT EXISTS sales (day date, article text, cents integer)")
        cursor.execute("TRUNCATE sales")
        with cursor.copy("COPY sales FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)
    return Report(
        files=len(cleaned),
        loaded=len(rows),
        rejected=sum(one.rejected for one in cleaned),
        cents=sum(cents for _, _, cents in rows),
    )


class Sales(WorkflowDefinition[Report]):
    """List the files, clean up to four at a time, load all of them."""

    name = "sales"
    definition_key = "etl.sales"

    @classmethod
    def build_with(cls, app: Horsies, directory: str) -> WorkflowSpec[Report]:
        """Build the graph for one directory."""
        files = list_files.node(node_id="files")(directory=Path(directory))
        cleaned = MapNode(clean, over=files, max_parallel=4, node_id="cleaned")
        report = load.node(node_id="report")(cleaned=from_node(cleaned))
        return app.workflow("sales", [files, cleaned, report], output=report)
