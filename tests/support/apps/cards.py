"""The application of a dashboard that shows every page; it has the task whose failure `web_rows`
inserts.
"""

from __future__ import annotations

from horsies import AppConfig, Horsies
from tests.support.workers import broker_settings

app = Horsies(AppConfig.model_validate({"broker": broker_settings()}))


@app.task("charge_card")
def charge_card(order_id: int, card: str = "") -> None: ...


@app.task("shop.catalogue.images.resize_and_upload_thumbnails")  # wider than a phone
def resize(path: str) -> None: ...
