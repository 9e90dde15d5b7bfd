"""The site: a Django project with one application."""
