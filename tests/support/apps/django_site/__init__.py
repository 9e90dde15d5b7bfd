"""A Django site whose django.tasks run in Horsies workers; needs Django 6."""
