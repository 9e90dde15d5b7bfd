"""The documentation site: `make site` builds it with the hooks of this folder."""
