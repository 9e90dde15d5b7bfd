"""The dashboard: pages, their live updates, and a JSON API over the same facts."""
