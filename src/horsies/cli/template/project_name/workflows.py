"""A workflow: one task per article, then their sum."""

from horsies import MapNode, WorkflowSpec, from_node

from project_name.app import app
from project_name.tasks import add_up, fetch_price, list_articles


@app.workflow_builder()
def stock_value() -> WorkflowSpec[int]:
    """Build the workflow; its nodes run as soon as their inputs are available."""
    articles = list_articles.node(node_id="articles")()
    prices = MapNode(fetch_price, over=articles, node_id="prices")
    total = add_up.node(node_id="total")(prices=from_node(prices))
    return app.workflow(
        "stock value",
        [articles, prices, total],
        output=total,
        definition_key="project_name.stock_value",
    )
