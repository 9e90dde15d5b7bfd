"""From nodes to a plan: check the graph, freeze it, write it as JSON."""
