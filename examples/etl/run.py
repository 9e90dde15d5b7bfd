"""Run the workflow once, now, and print its graph and its report."""

from pipeline import DATA, Sales, app

run = Sales.build_with(app, str(DATA)).start().unwrap()
report = run.result(timeout_ms=60_000)
print(run.draw().unwrap())
print(
    f"{report.loaded} rows of {report.files} files, {report.cents} cents; {report.rejected} rejected"
)
app.close()
