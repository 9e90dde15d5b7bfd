"""A Django site whose tasks are those of django.tasks, run by Horsies; needs Django 6."""
